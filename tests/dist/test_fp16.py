"""fp16 with a dynamic loss scale: overflows skip steps and halve the scale; stopping and going on keeps it."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.support.covering import slow
from tests.support.pool import Pools
from tests.support.training import LEAN, SMALL, metrics, train, without_wall_time

# A gradient of a logit lies within ±1 and fp16 ends at 65504: at a scale of 2^18 the first steps must be skipped.
FP16 = (
    "--precision fp16 --set optimizer.initial_loss_scale=262144 optimizer.hysteresis=1 optimizer.loss_scale_window=4"
).split()


@pytest.mark.parametrize(
    ("world", "layout"),
    [
        (1, "--data-parallel-sharding none"),
        # The first stage trains nothing: its rank has no optimizer state, and still must know of every overflow, also
        # of experts.
        slow(
            2,
            "--pp 2 --pipeline-cuts 4 --freeze vision projector --num-experts 4 --set model.experts.ffn_hidden_size=24",
        ),
        slow(2, "--cp 2"),
    ],
)
def test_overflow_skips_steps_and_resume_keeps_the_scale(pools: Pools, tmp_path: Path, world: int, layout: str):
    argv = [*LEAN, "--train-iters", "14", *FP16, *layout.split()]
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
    argv = [*LEAN, "--no-save"]
    pools(1).run(train, argv, str(tmp_path / "fp32"))
    pools(1).run(train, [*argv, "--precision", "fp16"], str(tmp_path / "fp16"))
    half, single = metrics(tmp_path / "fp16"), metrics(tmp_path / "fp32")
    assert all(record["updated"] for record in half)
    # 2^-11 is fp16's rounding; a dozen layers and some steps may add up some of them.
    assert [record["loss"] for record in half] == pytest.approx([record["loss"] for record in single], rel=20 * 2**-11)
    assert [record["loss"] for record in half] != [record["loss"] for record in single]


# Gradients of embeddings are larger: the loss of a text is over all others of the batch, and steep.
PAIRS = [
    *SMALL,
    *(
        "--objective contrastive --seq-length 80 --global-batch-size 8 --set model.objective.learn_temperature=true "
        "--temperature 0.2"
    ).split(),
    *"--train-iters 10 --no-save".split(),
]
PAIRS_FP16 = [
    *PAIRS,
    *(
        "--precision fp16 --set optimizer.initial_loss_scale=8192 optimizer.hysteresis=1 optimizer.loss_scale_window=3"
    ).split(),
]


@pytest.fixture(scope="module")
def embeddings(run_once) -> list[dict[str, Any]]:
    """The records of one process that trains embeddings in fp16."""
    return metrics(run_once(1, PAIRS_FP16))


@pytest.mark.parametrize(
    ("world", "layout"),
    [slow(2, ""), slow(2, "--pp 2 --vpp 2"), slow(2, "--pp 2 --schedule zb-h1"), slow(4, "--tp 2 --pp 2")],
)
def test_embeddings_skip_the_steps_of_one_process_in_every_layout(pools, embeddings, tmp_path, world, layout):
    """The second pass of a gradient cache overflows, and no rank updates; the scale that follows is the same.

    Not with context parallelism, whose ranks sum gradients of weights over fewer positions in fp16.
    """
    pools(world).run(train, [*PAIRS_FP16, *layout.split()], str(tmp_path))
    ours = metrics(tmp_path)
    for name in ("updated", "loss_scale"):
        assert [record[name] for record in ours] == [record[name] for record in embeddings], name
    assert {record["updated"] for record in ours} == {True, False}
    assert embeddings[0]["updated"] is False
    for name in ("loss", "grad_norm"):  # a skipped step has no norm
        found, expected = ([each[name] or 0.0 for each in records] for records in (ours, embeddings))
        assert found == pytest.approx(expected, rel=5 * 2**-11), name  # a rounding, which a temperature of 0.2 enlarges
