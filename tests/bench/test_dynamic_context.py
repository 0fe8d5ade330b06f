"""The simulation of dynamic groups: schedules that can be counted by hand, and the planner's seconds behind them."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from dynamic_context import Costs, Layout, dynamic_groups, loads_of, packed_rows, width_of

from megavlm.families import published_model
from megavlm.planner.cost import layer_seconds
from megavlm.planner.hardware import profile


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
