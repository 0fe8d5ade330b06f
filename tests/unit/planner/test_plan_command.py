"""`megavlm plan`: what it writes trains, and what cannot be is refused before a search."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megavlm.command_line.parsing import parse
from megavlm.planner.report import reasons, ties
from megavlm.programs import plan
from megavlm.rules.check import check
from megavlm.rules.defaults import resolve

NARROW = "--gpus 2 --placement stages --recompute none --top 3 --no-offload".split()


def test_what_it_writes_trains_on_the_users_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    best = tmp_path / "best.yaml"
    assert plan.main(["--model", "qwen2_vl_2b", *NARROW, "--images", "2x448", "--out", str(best)]) == 0
    printed = capsys.readouterr().out
    assert "a step has 128 sequences (--gbs) of 4,096 tokens, 524,288 in all" in printed
    assert printed.index("wrote") < printed.index("layout"), "a reader that stops early has its files"
    config = parse(["--config", str(best), "--datasets", "mine.json"])
    check(config, world=2)
    assert (config.run.world_size, config.train.global_batch_size, resolve(config).data.kind) == (2, 128, "files")
    assert config.optimizer.lr is None, "what the plan does not need is left to the run"
    assert plan.main(["--config", str(best), *NARROW, "--gbs", "6"]) == 0
    assert "a step has 6 sequences" in capsys.readouterr().out


def test_what_cannot_be_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan.main(["--model", "qwen2_vl_2b", *NARROW, *"--seq-length 1024 --images 20x2048".split()]) == 2
    assert "a sample of these images needs 106,582 tokens" in capsys.readouterr().err


@pytest.mark.parametrize(("gpus", "batch"), [(1, 128), (6, 132), (96, 192), (1024, 1024)])
def test_the_default_batch_is_one_that_people_use(gpus: int, batch: int) -> None:
    options = plan.options_of(["--model", "qwen2_vl_2b", "--gpus", str(gpus)])
    assert plan.configuration(options).train.global_batch_size == batch


def layout(seconds: float) -> Any:
    return SimpleNamespace(step=SimpleNamespace(seconds=seconds))


def test_layouts_within_the_planners_error_are_ties() -> None:
    assert ties([layout(1.0), layout(1.1), layout(1.13), layout(1.2)])[0].startswith("the first 3 are as good as equal")
    assert ties([layout(1.0), layout(1.2)]) == []


def test_reasons_that_differ_in_numbers_alone_are_one() -> None:
    said = ("1,024 is not divisible by 3", "512 is not divisible by 7", "no room in 80 GiB")
    rejected: list[Any] = [SimpleNamespace(reason=reason, candidate=SimpleNamespace(label="TP2")) for reason in said]
    told = ["2 × 1,024 is not divisible by 3 (as TP2)", "1 × no room in 80 GiB (as TP2)"]
    assert reasons(rejected) == [f"      {line}" for line in told]
