"""A run that goes on with other options says so, whatever they are, and says nothing else."""

from __future__ import annotations

import pytest

from megavlm.checkpoint.begun import as_begun, changed_options
from megavlm.command_line.parsing import parse
from megavlm.rules.defaults import with_start_defaults
from megavlm.rules.load import to_yaml

GIVEN = "--init-from F --datasets a.json --tp 2 --train-iters 100".split()


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("", None),
        ("--log-interval 5", None),
        ("--lr 2e-5 --gbs 16", "--global-batch-size 16 (before: 8), --lr 2e-05 (before: 1e-05), --vision-lr default"),
        ("--datasets b.json", "--datasets a.json b.json (before: a.json)"),
        ("--train-iters 200 --lr-decay-style constant", "--train-iters 200 (before: 100), --lr-decay-style constant"),
    ],
)
def test_each_changed_option_is_told(tmp_path, capsys, flags, told):
    (tmp_path / "checkpoints/iter_0000005").mkdir(parents=True)
    (tmp_path / "config.yaml").write_text(to_yaml(with_start_defaults(parse(GIVEN))))
    as_begun(parse([*GIVEN, "--run-dir", str(tmp_path), *flags.split()]))
    printed = capsys.readouterr().out
    assert (printed == "") if told is None else f"this run goes on with other options: {told}" in printed
    assert "schedule" not in printed


def test_a_new_length_moves_the_schedule() -> None:
    before, longer = parse(GIVEN), parse([*GIVEN, "--train-iters", "200"])
    assert "schedule of the new length" in (changed_options(before, longer) or "")
    fixed = [*GIVEN, "--lr-decay-iters", "100"]
    assert "schedule" not in (changed_options(parse(fixed), parse([*fixed, "--train-iters", "200"])) or "")
