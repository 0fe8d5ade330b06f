"""The simulation of failures agrees with Young's and Daly's formula where that holds."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import goodput

from megavlm.resilience.young_daly import LLAMA3_PER_GPU_HOUR, FailingJob

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
