"""A step whose numbers are bad leaves no trace: the run goes on, bit for bit, as if its batch had been left out."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import pytest

from megavlm.checkpoint import folders
from tests.support.covering import slow
from tests.support.faults import Fault, train_with
from tests.support.flags import DROPOUT
from tests.support.pool import Pools
from tests.support.training import LEAN, metrics, of_kind, train, without_wall_time

FIVE = "--lr-warmup-iters 1 --train-iters 5".split()

DELAYED = "--fp8 hybrid --fp8-recipe delayed --set precision.fp8_amax_history_len=3"

CODED = "--compress-gradients int8 --compress-weights int8 --precision bf16"


CASES = [
    (2, "--tp 2 --micro-batch-size 2", Fault("output", (3,), rank=1, name="language.layers.2")),
    (2, "--pp 2 --vpp 2", Fault("gradient", (3,), name="language.layers.0", value=inf)),
    (2, "--data-parallel-sharding optimizer_gradients", Fault("gradient", (3,), rank=0, name="vision.layers.0")),
    slow(2, "--precision fp16", Fault("output", (3,), rank=1, name="language.layers.1")),
    slow(2, "--data-parallel-sharding none", Fault("pixels", (3,), rank=1)),
    slow(2, "--data-parallel-sharding full --offload optimizer", Fault("pixels", (3,), rank=0)),
    slow(2, "--tp 2 --micro-batch-size 2 --placement colocated", Fault("pixels", (3,))),
    slow(2, "--pp 2 --lora-rank 4 --freeze vision", Fault("output", (3,), name="projector")),
    slow(2, CODED, Fault("gradient", (3,), rank=1, name="language.layers.2", value=inf)),
    slow(2, f"--data-parallel-sharding full {CODED}", Fault("gradient", (3,), rank=1, name="language.layers.2")),
    slow(2, f"--pp 2 --precision bf16 {DELAYED}", Fault("output", (3,), name="language.layers.1", value=inf)),
]


def without_reasons(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What a run that skips the third batch shares with one that leaves it out."""
    return [record for record in without_wall_time(records) if record["iteration"] != 3]


@pytest.mark.parametrize(("world", "layout", "fault"), CASES)
def test_a_bad_step_is_as_a_batch_left_out(pools: Pools, tmp_path: Path, world: int, layout: str, fault: Fault):
    argv = [*LEAN, *FIVE, *DROPOUT, *layout.split(), "--no-save"]
    pools(world).run(train_with, argv, str(tmp_path / "bad"), fault)
    pools(world).run(train, [*argv, "--iterations-to-skip", "3"], str(tmp_path / "out"))
    skipped, left_out = metrics(tmp_path / "bad"), metrics(tmp_path / "out")
    assert skipped[2]["refused"].split()[-1] in ("nan", "inf")
    assert [record["updated"] for record in skipped] == [True, True, False, True, True]
    assert [record["skipped_steps"] for record in skipped] == [0, 0, 1, 1, 1]
    assert without_reasons(skipped) == without_reasons(left_out)
    assert left_out[2]["loss"] is None
    assert left_out[2]["tokens_per_second"] == left_out[2]["model_tflops_per_device"] == 0, "it took no time"
    [event] = of_kind(tmp_path / "bad", "skip")
    assert event["iteration"] == 3
    assert event["module"] == (fault.name or "pixels")
    assert fault.rank in (None, event["culprit"])
    assert f"rank {event['culprit']} " in event["reason"]
    assert event["samples"]
    assert len(event["samples"]) <= (4 if "colocated" in layout else 2)


SPIKE = Fault("gradient", (20, 22), rank=1, name="language.layers.1", value=1e6)
LONGER = "--lr-warmup-iters 1 --train-iters 24 --spike-factor 50".split()


@pytest.mark.slow
def test_spikes_are_skipped_and_a_resumed_run_knows_the_median(pools: Pools, tmp_path: Path):
    argv = [*LEAN, *DROPOUT, *LONGER]
    pools(2).run(train_with, argv, str(tmp_path / "whole"), SPIKE)
    records = metrics(tmp_path / "whole")
    assert [record["iteration"] for record in records if not record["updated"]] == [20, 22]
    assert "times the median of the last 19 steps" in records[19]["refused"]
    skips = of_kind(tmp_path / "whole", "skip")
    assert [(event["iteration"], event["culprit"], event["module"]) for event in skips] == [
        (20, 1, "language.layers.1"),
        (22, 1, "language.layers.1"),
    ]
    assert all(1 <= len(event["samples"]) <= 2 and "times the median's" in event["reason"] for event in skips)

    pools(2).run(train_with, [*argv, "--train-iters", "21"], str(tmp_path / "halves"), SPIKE)
    after = replace(SPIKE, iterations=(1,))  # iteration 22 is the first that it trains
    pools(2).run(train_with, argv, str(tmp_path / "halves"), after)
    assert without_wall_time(metrics(tmp_path / "halves")) == without_wall_time(records)


def test_rewinding_leaves_out_all_batches_since_the_checkpoint(pools: Pools, tmp_path: Path):
    argv = [*LEAN, *DROPOUT, *"--lr-warmup-iters 1 --train-iters 8".split()]
    bad = Fault("output", (6,), name="language.layers.1")
    rewind = "--on-spike rewind --save-interval 3 --pp 2 --vpp 2".split()
    pools(2).run(train_with, [*argv, *rewind], str(tmp_path / "rewound"), bad)
    pools(2).run(train, [*argv, *"--iterations-to-skip 4-6 --pp 2 --vpp 2".split()], str(tmp_path / "out"))
    rewound, left_out = (without_wall_time(metrics(tmp_path / name)) for name in ("rewound", "out"))
    assert rewound[3]["updated"]
    assert not left_out[3]["updated"]
    assert rewound[6:] == left_out[6:]
    assert [len(of_kind(tmp_path / "rewound", kind)) for kind in ("skip", "rewind")] == [1, 1]


def test_bad_steps_in_a_row_end_the_run_and_keep_its_checkpoint(pools: Pools, tmp_path: Path):
    often = "--train-iters 9 --save-interval 1 --keep-checkpoints 1 --set numerics.max_consecutive_skips=3"
    argv = [*LEAN, *often.split()]
    bad = Fault("output", (2, 4, 5, 6), rank=1, name="language.layers.1")
    ends = pools(2).run(train_with, argv, str(tmp_path), bad)
    where = "iteration 6: the loss is nan: rank 1 is the first where the output of language.layers.1 is not finite"
    assert all(where in end for end in ends)
    assert all("this is bad step 3 in a row (numerics.max_consecutive_skips)" in end for end in ends)
    assert [record["iteration"] for record in metrics(tmp_path)] == [1, 2, 3, 4, 5, 6]
    assert folders.newest(tmp_path / "checkpoints").name == "iter_0000003"

    # The last step ends the run alone.
    ends = pools(2).run(train_with, [*argv, "--train-iters", "4"], str(tmp_path), replace(bad, iterations=(1,)))
    assert all("this is the last step" in end and "--iterations-to-skip 4" in end for end in ends)
    assert folders.newest(tmp_path / "checkpoints").name == "iter_0000003"
    pools(2).run(train, [*argv, "--train-iters", "4"], str(tmp_path))
    assert metrics(tmp_path)[-1]["skipped_steps"] == 1


def test_on_spike_stop_ends_at_the_first_bad_step(pools: Pools, tmp_path: Path):
    bad = Fault("output", (3,), name="projector")
    [end] = pools(1).run(train_with, [*LEAN, *FIVE, "--on-spike", "stop"], str(tmp_path), bad)
    assert end.startswith("iteration 3: the loss is nan: rank 0 is the first where the output of projector")
    assert end.endswith("and --on-spike is stop; no checkpoint was saved after it")
    assert len(metrics(tmp_path)) == 3


def test_a_checkpoint_that_was_due_at_a_bad_step_is_saved_after_the_next_good_one(pools: Pools, tmp_path: Path):
    bad = Fault("output", (2,), name="projector")
    pools(1).run(train_with, [*LEAN, *FIVE, *"--save-interval 2 --keep-checkpoints 0".split()], str(tmp_path), bad)
    assert sorted(path.name[-1] for path in (tmp_path / "checkpoints").iterdir()) == ["3", "4", "5"]


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_weights_that_explode_end_the_run(pools: Pools, tmp_path: Path, precision: str):
    """A learning rate beyond all measure (row 20 of the review)."""
    argv = [*LEAN, *"--train-iters 30 --save-interval 1 --lr 1e30 --clip-grad 0 --lr-warmup-iters 0".split()]
    [end] = pools(1).run(train_with, [*argv, "--precision", precision], str(tmp_path), Fault("pixels", ()))
    # In fp16 the weights overflow at once, though no loss has shown it yet: a save would be the first to.
    assert ("is not finite after iteration 1, which is not saved" if precision == "fp16" else "in a row") in end
    assert len(metrics(tmp_path)) <= 12


def test_what_does_not_happen_again_is_a_device_that_computes_wrongly(pools: Pools, tmp_path: Path):
    argv = [*LEAN, *"--train-iters 3 --no-save".split()]
    pools(1).run(train_with, argv, str(tmp_path), Fault("output", (2,), name="projector", passes=1))
    [event] = of_kind(tmp_path, "skip")
    assert "look for a device that computes wrongly" in event["reason"]
    assert "module" not in event
