"""Micro-batches that differ: their seconds, a step that ends with the slowest replica, and cuts for it."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest

from megavlm.arch.dims import Dims
from megavlm.arch.scenario import scenario_of
from megavlm.arch.schedules import Durations, PipelineShape, simulate
from megavlm.arch.workload import FIELDS, DataWindow, as_workload, typical_workload
from megavlm.config.schema import Config, DataConfig, TrainConfig
from megavlm.families import published_model
from megavlm.planner.candidates import Space, candidates
from megavlm.planner.evaluator import Estimate, LayoutEvaluator
from megavlm.planner.hardware import PROFILES, for_precision
from megavlm.planner.layer_profiles import LayerProfiles, layer_profiles
from megavlm.planner.partition import Partition, best_partition, simulate_partition
from megavlm.planner.search import search
from megavlm.planner.uneven import MicroBatches, micro_batches
from megavlm.rules.defaults import resolve
from tests.support.small_run import SMALL

H100 = for_precision(PROFILES["h100"], "bf16")
# Sequences of a large image each, of some, of none: what users mix.
QWEN = resolve(
    replace(
        SMALL,
        model=published_model("qwen2_5_vl_7b"),
        train=TrainConfig(seq_length=8192),
        execution=replace(SMALL.execution, transformer_impl="torch"),
    )
)


def window(config: Config, images: np.ndarray, *, side: int = 1008, balances: bool = False) -> DataWindow:
    """Return a window whose sequences have so many images, [steps, sequences]; those without have half the tokens."""
    sizes = DataConfig(kind="synthetic", images_per_sample=(1,), image_sizes=(side,))
    one = np.array(list(vars(typical_workload(replace(config, data=sizes))).values()), dtype=float)
    vision = np.array([name in ("patches", "patch_squares", "window_squares", "features") for name in FIELDS])
    tokens = np.where(images[..., None] > 0, one, one / 2)
    work = np.where(vision, one * images[..., None], tokens)
    flops = np.stack([images * 2e12, np.full(images.shape, 9e13)], axis=-1)
    return DataWindow(work, images, np.ones_like(images), flops, config.train.seq_length, balances=balances, records=9)


def drawn(steps: int, sequences: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).choice([0, 0, 1, 2, 4, 6], size=(steps, sequences), p=[0.2] * 4 + [0.1] * 2)


def profiles_of(config: Config, batches: MicroBatches, dims: Dims, hardware=H100) -> LayerProfiles:
    scenario = replace(scenario_of(config, dims, on_gpu=hardware.on_gpu), work=batches.largest)
    return layer_profiles(scenario, hardware, modes=("none",), batches=batches)


SHAPES = [
    PipelineShape("1f1b", 1, 1, 4),
    PipelineShape("1f1b", 3, 1, 4),
    PipelineShape("gpipe", 3, 1, 4),
    PipelineShape("zb-h1", 3, 1, 4),
    PipelineShape("interleaved", 2, 2, 4),
]


@pytest.mark.parametrize("shape", SHAPES)
def test_a_step_ends_with_its_slowest_replica(shape: PipelineShape) -> None:
    random = np.random.default_rng(0)
    forward, backward, weight = random.uniform(1, 3, (3, shape.chunks, shape.micro_batches, 5, 2))
    transfer = random.uniform(0, 1, shape.chunks - 1).tolist()
    together = simulate(shape, Durations(forward, backward, weight, transfer))
    alone = [
        [
            simulate(shape, Durations(*(each[:, :, step, replica] for each in (forward, backward, weight)), transfer))
            for replica in range(2)
        ]
        for step in range(5)
    ]
    slowest = [max(each.seconds for each in replicas) for replicas in alone]
    assert together.seconds == pytest.approx(sum(slowest) / 5)
    busy = np.mean([each.busy for replicas in alone for each in replicas], axis=0)
    assert together.busy == pytest.approx(busy)


@pytest.mark.parametrize("dims", [Dims(pp=2, dp=2), Dims(pp=1, tp=2), Dims(pp=2, cp=2)])
def test_each_micro_batch_takes_what_the_cost_model_says(dims: Dims) -> None:
    config = replace(QWEN, train=replace(QWEN.train, global_batch_size=8))
    batches = micro_batches(window(config, drawn(2, 8)), dp=dims.dp, cp=dims.cp, size=2, colocated=False)
    uneven = profiles_of(config, batches, dims).uneven
    assert uneven is not None
    for micro, step, replica in np.ndindex(*batches.work.shape[1:]):
        work = as_workload(batches.work[:, micro, step, replica])
        alone = layer_profiles(replace(scenario_of(config, dims, on_gpu=True), work=work), H100, modes=("none",))
        assert uneven.prefixes["forward"][-1, micro, step, replica] == pytest.approx(alone.forward[-1], rel=0.02)
        backward = uneven.prefixes["none"][-1, micro, step, replica]
        assert backward == pytest.approx(alone.modes["none"].backward[-1], rel=0.02)


def test_micro_batches_are_those_that_the_program_makes() -> None:
    config = replace(QWEN, train=replace(QWEN.train, global_batch_size=16))
    images = drawn(3, 16)
    in_turn = micro_batches(window(config, images), dp=2, cp=1, size=2, colocated=False)
    # Micro-batch k of replica r has sequences 4k + 2r and the next.
    assert in_turn.images[1, 2, 1] == images[2, 6:8].sum()
    assert in_turn.images.sum(axis=(0, 2)) == pytest.approx(images.sum(axis=1))
    evened = micro_batches(window(config, images, balances=True), dp=2, cp=1, size=2, colocated=False)
    loads = [each.images.sum(axis=0) for each in (in_turn, evened)]  # [steps, replicas]
    assert np.ptp(loads[1], axis=1).sum() < np.ptp(loads[0], axis=1).sum()
    assert evened.largest.patches <= in_turn.largest.patches
    shared = micro_batches(window(config, images), dp=1, cp=2, size=2, colocated=False)
    assert shared.images.shape == (8, 3, 1)
    assert shared.work[FIELDS.index("tokens")] == pytest.approx(8192)  # half of two sequences


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("device", ["h100", "cpu"])
def test_cuts_are_those_of_brute_force(shape: PipelineShape, device: str) -> None:
    config = resolve(
        replace(
            SMALL,
            train=replace(SMALL.train, global_batch_size=8),
            model=replace(
                SMALL.model,
                vision=replace(SMALL.model.vision, num_layers=3),
                language=replace(SMALL.model.language, num_layers=3),
            ),
        )
    )
    dims = Dims(pp=shape.pp, vpp=shape.vpp, dp=2)
    batches = micro_batches(window(config, 4 * drawn(2, 8), side=64), dp=2, cp=1, size=1, colocated=False)
    profiles = profiles_of(config, batches, dims, PROFILES[device])
    modes = ("none",) * shape.chunks
    every = combinations(range(1, profiles.count), shape.chunks - 1)
    best = min(simulate_partition(profiles, shape, cuts, modes).seconds for cuts in every)
    found = best_partition(profiles, shape, simulations=10**6)
    assert isinstance(found, Partition)
    assert found.exact
    assert found.seconds == pytest.approx(best, rel=1e-12)
    early = best_partition(profiles, shape, simulations=1, descent=False)
    assert isinstance(early, Partition)
    assert early.bound <= best * (1 + 1e-9)


def test_equal_micro_batches_are_no_news() -> None:
    """A window in which all are as the average sample gives the layouts, cuts and seconds of a plan without one."""
    config = replace(SMALL, train=replace(SMALL.train, global_batch_size=8))
    sample = np.array(list(vars(typical_workload(config)).values()), dtype=float)
    work, count = np.broadcast_to(sample, (2, 8, len(FIELDS))), np.ones((2, 8), int)
    flops = np.ones((2, 8, 2))
    same = DataWindow(work, count, count, flops, config.train.seq_length, config.model.language.window_size)
    space = Space(tp=(1, 2), vpp=(1, 2))
    without, given = (search(config, 4, PROFILES["h100"], space=space, window=each) for each in (None, same))
    assert [each.candidate for each in given.best] == [each.candidate for each in without.best]
    for ours, theirs in zip(given.best, without.best, strict=True):
        assert ours.partition.cuts == theirs.partition.cuts
        assert ours.step.seconds == pytest.approx(theirs.step.seconds, rel=1e-9)
        assert ours.step.memory == theirs.step.memory


@pytest.mark.parametrize("order", ["drawn", "light ends"])
def test_bounds_hold_and_memory_is_that_of_the_largest_micro_batch(order: str) -> None:
    config = replace(SMALL, train=replace(SMALL.train, global_batch_size=16))
    images = drawn(2, 16) if order == "drawn" else np.full((2, 16), 9)
    if order == "light ends":
        images[:, :4] = images[:, -4:] = 0
    found = window(config, images, side=64)
    space = Space(vpp=(1, 2), cp=(1,), sharding=("optimizer",), recompute=("none",))
    judge = LayoutEvaluator(config, PROFILES["h100"], window=found)
    judged = 0
    for each in candidates(4, space, length=config.train.seq_length):
        if judge.infeasible_reason(each) is None:
            estimate = judge.estimate(each, simulations=20)
            assert isinstance(estimate, Estimate)
            assert judge.bound(each) <= estimate.step.seconds * (1 + 1e-9)
            batches, scenario = judge.batches(each), judge.profiles(each).scenario
            assert batches is not None
            assert scenario.work == batches.largest
            assert batches.largest.patches >= batches.mean.patches
            assert estimate.step.memory[0].activations > 0
            judged += 1
    assert judged > 30


def test_the_heaviest_replica_is_that_of_what_the_pipeline_computes() -> None:
    """A colocated encoder's images are shared by all ranks, and its pipeline holds the language model alone."""
    config = replace(SMALL, train=replace(SMALL.train, global_batch_size=2))
    found = replace(window(config, np.array([[1, 2]])), flops=np.array([[[1.0, 9.0], [20.0, 3.0]]]))
    heaviest = [micro_batches(found, dp=2, cp=1, size=1, colocated=each).heaviest.tolist() for each in (False, True)]
    assert heaviest == [[1], [0]]
