"""fp16 with a dynamic loss scale: overflows skip steps and halve the scale; stopping and going on keeps it."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from tests.support.pool import Pools
from tests.support.training import LONG, SMALL, metrics, train, without_wall_time

# A gradient of a logit lies within ±1 and fp16 ends at 65504: at a scale of 2^18 the first steps must be skipped.
FP16 = "--precision fp16 --initial-loss-scale 262144 --hysteresis 1 --loss-scale-window 4".split()


@pytest.mark.parametrize(
    ("world", "layout"),
    [
        (1, "--data-parallel-sharding none"),
        # The first stage trains nothing: its rank has no optimizer state, and still must know of every overflow.
        pytest.param(2, "--pp 2 --freeze vision projector", marks=pytest.mark.slow),
        pytest.param(2, "--cp 2", marks=pytest.mark.slow),
    ],
)
def test_overflow_skips_steps_and_resume_keeps_the_scale(pools: Pools, tmp_path: Path, world: int, layout: str):
    argv = [*SMALL, *LONG, *FP16, *layout.split()]
    pools(world).run(train, argv, str(tmp_path / "whole"))
    records = metrics(tmp_path / "whole")
    skipped = [record for record in records if not record["updated"]]
    assert records[0] in skipped
    assert 2 <= len(skipped) <= 10
    good = 0
    for before, after in pairwise(records):
        good = 0 if not before["updated"] else good + 1
        factor = 0.5 if not before["updated"] else 2 if good == 4 else 1
        good %= 4
        assert after["loss_scale"] == before["loss_scale"] * factor, before["iteration"]
    assert all((record["grad_norm"] is None) == (not record["updated"]) for record in records)
    assert records[-1]["loss"] < records[0]["loss"]

    # The first run stops while the scale is still being halved.
    pools(world).run(train, [*argv, "--train-iters", "3"], str(tmp_path / "halves"))
    pools(world).run(train, argv, str(tmp_path / "halves"))
    assert without_wall_time(metrics(tmp_path / "halves")) == without_wall_time(records)


def test_curve_is_that_of_fp32(pools: Pools, tmp_path: Path):
    argv = [*SMALL, "--no-save"]
    pools(1).run(train, argv, str(tmp_path / "fp32"))
    pools(1).run(train, [*argv, "--precision", "fp16"], str(tmp_path / "fp16"))
    half, single = metrics(tmp_path / "fp16"), metrics(tmp_path / "fp32")
    assert all(record["updated"] for record in half)
    # 2^-11 is fp16's rounding; a dozen layers and some steps may add up some of them.
    assert [record["loss"] for record in half] == pytest.approx([record["loss"] for record in single], rel=20 * 2**-11)
    assert [record["loss"] for record in half] != [record["loss"] for record in single]
