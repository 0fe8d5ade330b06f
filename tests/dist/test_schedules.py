"""Schedules: GPipe and ZB-H1 give one process's numbers, and ranks walk the orders that the planner simulates."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

from tests.support.covering import fast_and_slow, short_and_long, slow
from tests.support.flags import MODELS
from tests.support.training import LEAN, SMALL, THREE, assert_same_curve, metrics, train, without_wall_time

# Schedule, processes, model, options.
FAST = [
    ("gpipe", 2, "one-image-rank", "--pp 2"),
    ("zb-h1", 2, "frozen-vision-projector", "--pp 2"),
    ("zb-h1", 4, "rich", "--pp 4 --pipeline-cuts 1 3 8"),
    (
        "zb-h1",
        4,
        "one-image-rank",
        "--pp 2 --overlap-grad-reduce --overlap-param-gather --set parallel.ddp_bucket_size=4000",
    ),
]
LAYOUTS = ((4, "--pp 2 --tp 2"), (4, "--pp 4"), (2, "--pp 2"))
SLOW = [
    ("zb-h1", 4, "qwen3-vl", "--pp 2 --tp 2 --set execution.loss_chunk_tokens=2"),
    ("gpipe", 4, "rich", "--pp 2 --tp 2"),
    *[("gpipe", 2, model, "--pp 2") for model in ("plain", "frozen-vision", "qwen3-vl", "gemma3", "qformer")],
    # ZB-H1 meets each model, at two stages, at four and with TP in turn.
    *[("zb-h1", world, model, flags) for model, (world, flags) in zip(MODELS, cycle(LAYOUTS), strict=False)],
]


@pytest.mark.parametrize(("schedule", "world", "model", "options", "steps"), short_and_long(FAST, [*FAST, *SLOW]))
def test_every_schedule_gives_the_numbers_of_one_process(
    pools, one_process, tmp_path, schedule, world, model, options, steps
):
    argv = [*SMALL, "--no-save", *MODELS[model].split(), *options.split(), "--schedule", schedule, *steps]
    pools(world).run(train, argv, str(tmp_path))
    assert_same_curve(metrics(tmp_path), one_process(model, steps))


# Processes, options. Every schedule makes the sums of 1F1B, in its order.
OPTIONS = {
    "bf16": (2, "--precision bf16"),
    "fp16": (2, "--precision fp16"),
    "fp8": (2, "--precision bf16 --fp8 hybrid"),
    "selective": (4, "--recompute-granularity selective --tp 2"),
    "dropout": (2, "--hidden-dropout 0.2 --attention-dropout 0.2"),
    "lora": (4, "--lora-rank 4 --lora-targets language --freeze projector --tp 2"),
    "offload": (2, "--offload activations"),
    "no-zero": (4, "--data-parallel-sharding none --overlap-grad-reduce --set parallel.ddp_bucket_size=4000"),
    "overlap": (4, "--overlap-grad-reduce --overlap-param-gather --set parallel.ddp_bucket_size=4000"),
    "cp2": (4, "--cp 2"),
    "experts": (2, "--num-experts 4 --set model.experts.shared_ffn_hidden_size=32"),
    "experts-tp": (4, "--num-experts 4 --ep 2 --tp 2 --set model.experts.shared_ffn_hidden_size=32"),
    "colocated-passes": (2, "--placement colocated --encoder-chunk-patches 20 --micro-batch-size 2"),
    "encode-ahead": (2, "--placement colocated --encode-ahead --freeze vision projector"),
    "loss-chunks": (2, "--set execution.loss_chunk_tokens=2 model.language.tie_embeddings=true"),
    "late-embedding": (2, "--pipeline-cuts 5 --set model.language.tie_embeddings=true"),
}


@pytest.mark.parametrize("option", fast_and_slow(["experts"], OPTIONS))
def test_zero_bubble_changes_no_number(pools, tmp_path, option):
    world, options = OPTIONS[option]
    argv = [*LEAN, *THREE, "--no-save", "--pp", "2", *options.split(), "--schedule"]
    for schedule in ("1f1b", "zb-h1"):
        pools(world).run(train, [*argv, schedule], str(tmp_path / schedule))
    ours, theirs = ([(step["loss"], step["grad_norm"]) for step in metrics(tmp_path / s)] for s in ("zb-h1", "1f1b"))
    assert ours == theirs


# Processes, model, options; layers are Transformer Engine's, whose backward passes leave products to a store.
TE_OPTIONS = {
    "overlap": (4, "qwen2.5-vl", "--overlap-grad-reduce --overlap-param-gather --set parallel.ddp_bucket_size=4000"),
    "tp": (4, "rich", "--tp 2"),
    "recompute": (2, "one-image-rank", "--recompute-granularity full"),
    "frozen": (2, "frozen-vision-projector", ""),
    "lora": (4, "plain", "--lora-rank 4 --lora-targets language --freeze projector --tp 2"),
}


def train_on_transformer_engine(argv: Sequence[str], run_dir: str) -> int:
    """Train with its layers, and return how many weight gradients these left."""
    from megavlm.model.weight_gradients import WeightGradients, _Store
    from tests.support.stand_ins import transformer_engine

    left: list[WeightGradients] = []
    put = _Store.put

    def counted(store: _Store, *given: Any) -> None:
        left.append(store._gradients)
        put(store, *given)

    with transformer_engine(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(_Store, "put", counted)
        train(argv, run_dir)
    return len(left)


@pytest.mark.parametrize("option", fast_and_slow(["overlap"], TE_OPTIONS))
def test_zero_bubble_changes_no_number_of_transformer_engine(pools, tmp_path, option):
    """Products that add to sums themselves round them otherwise; where gradients wait, none do."""
    world, model, options = TE_OPTIONS[option]
    options += " --no-gradient-accumulation-fusion --pp 2 --schedule"
    argv = [*SMALL, *THREE, "--no-save", *MODELS[model].split(), *options.split()]
    for schedule in ("1f1b", "zb-h1"):
        left = pools(world).run(train_on_transformer_engine, [*argv, schedule], str(tmp_path / schedule))
        assert (max(left) > 0) == (schedule == "zb-h1" and option != "lora")  # whose weights are frozen
    ours, theirs = ([(step["loss"], step["grad_norm"]) for step in metrics(tmp_path / s)] for s in ("zb-h1", "1f1b"))
    assert ours == theirs


@pytest.mark.slow
def test_validation_and_answers_do_not_know_the_schedule(pools, tmp_path):
    argv = (
        "--recipe demo --train-iters 4 --lr-warmup-iters 1 --lr-wsd-decay-iters 2 --set evaluation.eval_samples=6 "
        "--eval-interval 2"
    )
    for schedule in ("1f1b", "zb-h1", "gpipe"):
        flags = [*argv.split(), *"--sample-interval 2 --pp 2 --schedule".split(), schedule]
        pools(2).run(train, flags, str(tmp_path / schedule))
    expected, *others = (without_wall_time(metrics(tmp_path / each)) for each in ("1f1b", "zb-h1", "gpipe"))
    assert any("validation/loss" in step for step in expected)
    assert all(each == expected for each in others)


def train_recording_what_is_left(argv: Sequence[str], run_dir: str) -> list[tuple[int, ...]]:
    """Train, and return the shapes of the weights whose gradients backward passes of this rank left for later."""
    from megavlm.model.weight_gradients import WeightGradients

    left: list[tuple[int, ...]] = []
    leave = WeightGradients.leave

    def recorded(self, weights, compute):
        left.extend(tuple(weight.shape) for weight in weights)
        leave(self, weights, compute)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WeightGradients, "leave", recorded)
        train(argv, run_dir)
    return left


def test_zero_bubble_leaves_all_products_but_those_of_the_first_stage(pools, tmp_path):
    argv = [*SMALL, *"--no-save --train-iters 1 --lr-warmup-iters 0 --pp 2 --pipeline-cuts 8 --schedule zb-h1".split()]
    first, last = pools(2).run(train_recording_what_is_left, argv, str(tmp_path))
    # After cut 8 there are four language layers with four products each, and the output layer; heads of 12.
    layer = [(144, 48), (48, 48), (128, 48), (48, 64)]
    assert first == []
    assert sorted(last) == sorted([*layer * 4, (97, 48)] * 4), "micro-batches"


def train_recording_reductions(argv: Sequence[str], run_dir: str) -> None:
    """Train, and write down in which passes DDP counts gradients as the last of a step, in which it begins to reduce a
    bucket, and how often it counts each parameter in a step.
    """
    import torch.distributed as dist
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup as Buckets

    from megavlm.pipeline import walker

    now: list[object] = []
    counted: list[list[object]] = []
    reduced: list[list[object]] = []
    times: list[int] = []
    run, register = walker._Step.run, Buckets.register_grad_ready
    start, reset = Buckets.start_grad_sync, Buckets.reset

    def recorded_run(self, each):
        now[:] = [each.kind, each.chunk, each.micro]
        run(self, each)
        now.clear()

    def recorded_register(self, *args, **kwargs):
        if self.is_last_microbatch and now not in counted:
            counted.append(list(now))
        register(self, *args, **kwargs)

    def recorded_start(self, *args, **kwargs):
        if not self.is_first_batch and now not in reduced:
            reduced.append(list(now))
        start(self, *args, **kwargs)

    def recorded_reset(self):
        times.extend(self.per_param_grad_ready_counts.values())
        reset(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(walker._Step, "run", recorded_run)
        patch.setattr(Buckets, "register_grad_ready", recorded_register)
        patch.setattr(Buckets, "start_grad_sync", recorded_start)
        patch.setattr(Buckets, "reset", recorded_reset)
        train(argv, run_dir)
    found = {"counted": sorted(counted), "reduced": sorted(reduced), "times": sorted(set(times))}
    Path(run_dir, f"reductions-{dist.get_rank()}.json").write_text(json.dumps(found))


@pytest.mark.parametrize(("schedule", "vpp"), [("zb-h1", 1), slow("gpipe", 1), slow("interleaved", 2)])
def test_gradients_are_reduced_with_the_last_micro_batch(pools, tmp_path, schedule, vpp):
    """DDP learns in a run's first step how often each parameter meets a gradient before its bucket may be reduced. Were
    all micro-batches counted, steps with another number of them would reduce too early, and lose gradients, or never.
    """
    argv = [*LEAN, *f"--no-save --train-iters 3 --pp 2 --vpp {vpp} --schedule {schedule}".split()]
    argv += "--overlap-grad-reduce --set parallel.ddp_bucket_size=4000".split()
    pools(4).run(train_recording_reductions, argv, str(tmp_path))
    for rank in range(4):
        found = json.loads((tmp_path / f"reductions-{rank}.json").read_text())
        chunks = [rank // 2 + 2 * number for number in range(vpp)]
        last = [["B", chunk, 1] for chunk in chunks] + [["W", chunk, 1] for chunk in chunks if schedule == "zb-h1"]
        assert found["times"] == [1]
        assert found["counted"]
        assert found["reduced"], "beside backward passes, not when all are done"
        assert all(each in last for each in [*found["counted"], *found["reduced"]])
