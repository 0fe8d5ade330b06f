"""Simulations: of dynamic groups, failures, packing and balance, and the planner's of the benchmarked layouts."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import data
import goodput
import planner
import pytest
from dynamic_context import Costs, Layout, dynamic_groups, loads_of, packed_rows, width_of

from megavlm.families import published_model
from megavlm.planner.cost import layer_seconds
from megavlm.planner.hardware import profile
from megavlm.resilience.young_daly import LLAMA3_PER_GPU_HOUR, FailingJob


@dataclass
class Even:
    """A micro-batch takes a second a token and one for every ten of its squares, evenly divided, on four ranks."""

    ranks: int = 4
    capacity: int = 8

    def seconds(self, cp: int, tokens: int, squares: int) -> float:
        return (tokens + squares / 10) / cp


def test_wide_groups_begin_and_narrow_ones_fill_up() -> None:
    assert loads_of([(1, 3.0), (2, 5.0), (1, 4.0), (4, 1.0)], 4).tolist() == [6.0, 6.0, 5.0, 4.0]


def test_samples_get_the_fewest_ranks_that_hold_them() -> None:
    assert [width_of(length, Even()) for length in (8, 9, 16, 17, 32)] == [1, 2, 2, 4, 4]


def test_short_samples_gain_nothing_and_one_long_one_does() -> None:
    """Eight samples of 8 tokens are two rows for each of four replicas, and two bins for each of four ranks."""
    short = [8] * 8
    assert packed_rows(Even(), 1, short, longest=8) == (pytest.approx(2 * 14.4), pytest.approx(1.0))
    assert dynamic_groups(Even(), short) == pytest.approx(2 * 14.4)
    # 32 tokens fill a row of their own, four short ones another: two replicas of CP 2, or four ranks and then one each.
    mixed = [32, 8, 8, 8, 8]
    assert packed_rows(Even(), 2, mixed, longest=32)[0] == pytest.approx((32 + 102.4) / 2)
    assert dynamic_groups(Even(), mixed) == pytest.approx((32 + 102.4) / 4 + 14.4)


def test_a_job_that_outlasts_the_step_gets_more_ranks() -> None:
    """One rank could hold the long sample, but would compute for longer than four that share it and the rest."""
    assert dynamic_groups(Even(capacity=32), [32, 1, 1, 1]) == pytest.approx((32 + 102.4) / 4 + 3.3)


@pytest.mark.parametrize("layout", [Layout(1), Layout(2, "full", "optimizer_gradients", ("activations",))])
@pytest.mark.parametrize("length", [1_000, 40_000])
def test_seconds_are_the_planners(layout: Layout, length: int) -> None:
    model, hardware = published_model("qwen2_5_vl_7b"), profile("h100")
    costs, work = Costs(model, hardware, 16, layout), (4, 40_000, 40_000 * length)
    scenario = costs.scenario(*work)
    each = [
        layer_seconds(name, scenario, hardware, layout.recompute)
        for name in scenario.names[scenario.names.index("embedding") :]
    ]
    assert costs.seconds(*work) == pytest.approx(sum(s.forward + s.backward for s in each), rel=0.02)


OPTIONS = argparse.Namespace(packing_window=512, seq_length=8192, ranks=8, sequences_per_rank=8, steps=2)


def test_packing_fills_more_positions_than_padding():
    useful = {name: found["useful"] for name, found in data.packing(OPTIONS)["packing"].items()}
    assert useful["naive padding"] < useful["in order"] < useful["best fit, decreasing (ours)"] <= 1


def test_balancing_brings_the_largest_load_nearer_to_the_mean():
    before, after = data.balance(OPTIONS)["imbalance"].values()
    assert all(1 <= after[kind] < before[kind] for kind in ("vision", "language"))


JOB = FailingJob(1024, LLAMA3_PER_GPU_HOUR, stall=30.0, restart=300.0, detection=90.0)


def test_the_published_rate_is_an_interruption_every_2_8_hours_on_16384_gpus():
    assert FailingJob(16_384, LLAMA3_PER_GPU_HOUR, 0, 0, 0).between_failures / 3600 == pytest.approx(2.78, abs=0.01)


def test_no_interval_does_better_than_the_recommended_one():
    best = JOB.best_interval
    found = {factor: goodput.simulated(JOB, factor * best, failures=50_000, seed=2) for factor in (0.4, 1.0, 2.5)}
    assert found[1.0] > 0.97
    assert max(found, key=lambda factor: found[factor]) == 1.0
    for factor, value in found.items():
        assert value == pytest.approx(JOB.goodput(factor * best), abs=1e-3)


@pytest.mark.parametrize("between", [600.0, 3000.0])
def test_the_formula_holds_where_failures_come_as_often_as_saves(between: float):
    job = FailingJob(1, 3600 / between, stall=60.0, restart=300.0, detection=30.0)
    for interval in (150.0, 600.0):
        found = goodput.simulated(job, interval, failures=400_000, seed=3)
        assert found == pytest.approx(job.goodput(interval), rel=0.02)


def test_every_configuration_has_a_prediction():
    seconds = {name: planner.predicted(flags, "h100") for name, flags in planner.CASES.items()}
    assert all(value > 0 for value in seconds.values())
    assert seconds["dp2 full"] > seconds["dp2"] > seconds["dp2 frozen vision"]
