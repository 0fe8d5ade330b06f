"""Ranges cover every number, layouts that work are allowed, and sequence parallelism follows TP."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megavlm.command_line.parsing import parse
from megavlm.config.derived import device_queues, minutes_to_meet, overlapped, sequence_parallel
from megavlm.config.schema import Config
from megavlm.families import published_model
from megavlm.rules import first
from megavlm.rules.check import check
from megavlm.rules.fields import options
from megavlm.rules.precision_rules import fp8_fits_the_widths
from tests.support.mistakes import rows_by_section

# The bounds of these depend on other options; rules.py and the planner check them.
UNRANGED = {"model.vision.feature_layer", "model.objective.sigmoid_bias", "placement.pipeline_cuts"}


def test_every_number_has_a_range() -> None:
    numbers = {option.key for option in options() if option.kind.scalar in (int, float)}
    assert {option.key for option in options() if option.valid is not None} == numbers - UNRANGED


def test_the_defaults_are_a_run() -> None:
    for world in (1, 2, 4, 8):
        check(Config(), world=world)


@pytest.mark.parametrize("row", rows_by_section()["allowed"], ids=lambda row: row[0])
def test_what_works_is_allowed(row: list[str]) -> None:
    check(parse(row[0].split()), world=int(row[1]) if len(row) > 1 else 1)


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_fp8_takes_widths_of_mlps_that_are_padded(tp: int) -> None:
    """Qwen2.5-VL's tower is 3,420 wide. MXFP8 needs multiples of 32, which 3,424 is, and 1,712 on each of two ranks is
    not.
    """
    argv = f"--precision bf16 --fp8 hybrid --fp8-parts vision --tp {tp}".split()
    config = replace(parse(argv), model=published_model("qwen2_5_vl_7b"))
    assert first((fp8_fits_the_widths,), config) is None
    in_blocks = replace(config, precision=replace(config.precision, fp8_recipe="mxfp8"))
    assert (first((fp8_fits_the_widths,), in_blocks) is None) == (tp in (1, 4))


@pytest.mark.parametrize(
    ("argv", "expected"), [("", False), ("--tp 2", True), ("--tp 2 --no-sp", False), ("--tp 2 --sp", True)]
)
def test_sequence_parallelism_follows_tp_unless_asked(argv: str, expected: bool) -> None:
    assert sequence_parallel(parse(argv.split())) is expected


@pytest.mark.parametrize(
    ("argv", "dp", "expected"),
    [
        ("", 2, (True, True)),
        ("", 1, (False, False)),
        ("--data-parallel-sharding none", 2, (True, False)),
        ("--data-parallel-sharding full", 2, (False, False)),
        ("--no-overlap-grad-reduce", 2, (False, False)),
        ("--no-overlap-param-gather", 2, (True, False)),
        ("--overlap-param-gather", 1, (True, True)),
        ("--overlap-grad-reduce", 1, (True, False)),
    ],
)
def test_overlaps_are_on_where_they_hide_something(argv: str, dp: int, expected: tuple[bool, bool]) -> None:
    parallel = overlapped(parse(argv.split()), dp=dp).parallel
    assert (parallel.overlap_grad_reduce, parallel.overlap_param_gather) == expected


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ("", None),
        ("--tp 2", 1),
        ("--tp 2 --data-parallel-sharding full", 32),
        ("--placement colocated --encode-ahead --freeze vision projector", 32),
    ],
)
def test_kernels_begin_in_order_for_tensor_parallelism_alone(argv: str, expected: int | None) -> None:
    assert device_queues(parse(argv.split())) == expected


def test_a_run_dir_that_exists_is_resumed(tmp_path: pytest.TempPathFactory) -> None:
    check(parse(["--run-dir", str(tmp_path)]), world=1)


@pytest.mark.parametrize(("flags", "minutes"), [("--init-from HF", 10), ("--vision-from s3://bucket/clip", 60)])
def test_ranks_wait_for_nodes_that_copy_a_model(flags: str, minutes: float):
    assert minutes_to_meet(parse(flags.split())) == minutes
