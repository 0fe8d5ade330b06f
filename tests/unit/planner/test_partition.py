"""Cuts against brute force over every partition."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path

import numpy as np
import pytest

from benchmarks.placement_paper import table
from megavlm.arch.dims import Dims, ScheduleName
from megavlm.arch.scenario import scenario_of
from megavlm.arch.schedules import PipelineShape, held_at_peaks
from megavlm.config.schema import Config
from megavlm.planner.layer_profiles import LayerProfiles
from megavlm.planner.partition import Partition, best_partition, simulate_partition
from megavlm.rules.defaults import resolve

INF = float("inf")


def drawn(seed: int, layers: int) -> LayerProfiles:
    """Random layers, some of them frozen (no backward pass)."""
    random = np.random.default_rng(seed)

    def prefix(values: np.ndarray) -> np.ndarray:
        return np.concatenate([[0.0], np.cumsum(values)])

    forward = random.uniform(0.2, 2.0, layers)
    backward = forward * random.choice([0, 1, 2], layers)
    waits = backward == 2 * forward
    nothing = np.zeros(layers + 1)
    return LayerProfiles(
        scenario=scenario_of(resolve(Config()), Dims(1, 1, 1, 1), on_gpu=True),
        recompute="none",
        first=0,
        forward=prefix(forward),
        backward=prefix(backward),
        launch=nothing,
        launch_back=nothing,
        weight=prefix(np.where(waits, forward, 0)),
        weight_launch=nothing,
        waiting=prefix(np.where(waits, random.uniform(1, 4, layers), 0)),
        model_state=prefix(random.uniform(1, 3, layers)),
        saved=prefix(random.uniform(1, 4, layers)),
        transient=random.uniform(0, 2, layers),
        transfer=np.concatenate([[0.0], random.uniform(0, 0.3, layers - 1), [0.0]]),
    )


def fits(profiles: LayerProfiles, shape: PipelineShape, cuts: tuple[int, ...], cap: float) -> bool:
    """Whether every rank stays below `cap` bytes: those kept by all of its chunks, and the most transient ones."""
    every, bounds = held_at_peaks(shape), list(pairwise((0, *cuts, profiles.count)))
    for rank in range(shape.pp):
        kept = peak = 0.0
        for (a, b), held in zip(bounds[rank :: shape.pp], every[rank], strict=True):
            state, saved, waiting = (
                float(sums[b] - sums[a]) for sums in (profiles.model_state, profiles.saved, profiles.waiting)
            )
            kept += state + max(whole * saved + halves * waiting for whole, halves in held)
            peak = max(peak, float(profiles.transient[a:b].max()))
        if kept + peak > cap:
            return False
    return True


def brute_force(profiles: LayerProfiles, shape: PipelineShape, cap: float = INF) -> float:
    """Least simulated seconds over everything that fits; inf where nothing does."""
    every = combinations(range(1, profiles.count), shape.chunks - 1)
    fitting = (cuts for cuts in every if fits(profiles, shape, cuts, cap))
    return min((simulate_partition(profiles, shape, cuts).seconds for cuts in fitting), default=INF)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    ("layers", "shape"),
    [
        (5, PipelineShape("1f1b", 1, 1, 3)),
        (7, PipelineShape("1f1b", 2, 1, 2)),
        (7, PipelineShape("1f1b", 3, 1, 5)),
        (6, PipelineShape("1f1b", 4, 1, 4)),
        (6, PipelineShape("interleaved", 2, 2, 4)),
        (7, PipelineShape("zb-h1", 2, 1, 3)),
        (7, PipelineShape("zb-h1", 3, 1, 5)),
        (6, PipelineShape("zb-h1", 4, 1, 2)),
        (7, PipelineShape("gpipe", 3, 1, 4)),
    ],
)
@pytest.mark.parametrize("share", [None, 0.8, 0.6])
def test_finds_what_brute_force_finds(seed: int, layers: int, shape: PipelineShape, share: float | None) -> None:
    profiles = drawn(seed, layers)
    everything = float(profiles.model_state[-1] + shape.pp * profiles.saved[-1])
    cap = INF if share is None else share * everything
    expected = brute_force(profiles, shape, cap)
    found = best_partition(profiles, shape, caps=(cap,) * shape.pp, simulations=10**6)
    if expected == INF:
        assert found == INF
        return
    assert isinstance(found, Partition)
    assert found.exact
    assert found.seconds == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_stages_on_other_devices_get_other_layers(seed: int, schedule: ScheduleName) -> None:
    """Ranks 1 and 2 are three times as fast, and rank 1 has hardly any memory."""
    profiles, shape = drawn(seed, 7), PipelineShape(schedule, 3, 1, 5)
    fast = replace(profiles, **{name: getattr(profiles, name) / 3 for name in ("forward", "backward", "weight")})
    mixed = replace(profiles, stages=(profiles, fast, fast))
    assert brute_force(mixed, shape) < brute_force(profiles, shape)
    found = best_partition(mixed, shape, simulations=10**6)
    assert isinstance(found, Partition)
    assert found.exact
    assert found.seconds == pytest.approx(brute_force(mixed, shape), rel=1e-12)
    assert best_partition(mixed, shape, caps=(1e6, 1e-6, 1e6)) == INF


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    "shape", [PipelineShape("1f1b", 5, 1, 6), PipelineShape("interleaved", 3, 2, 6), PipelineShape("zb-h1", 5, 1, 7)]
)
def test_what_a_short_search_finds_is_a_local_optimum(seed: int, shape: PipelineShape) -> None:
    profiles = drawn(seed, 24)
    cap = 0.5 * float(profiles.model_state[-1] + shape.pp * profiles.saved[-1])
    found = best_partition(profiles, shape, caps=(cap,) * shape.pp, simulations=2)
    assert isinstance(found, Partition)
    assert not found.exact
    assert found.bound <= found.seconds
    bounds = (0, *found.cuts, profiles.count)
    for place, cut in enumerate(found.cuts):
        for step in (-3, -2, -1, 1, 2, 3):
            moved = (*found.cuts[:place], cut + step, *found.cuts[place + 1 :])
            if bounds[place] < cut + step < bounds[place + 2] and fits(profiles, shape, moved, cap):
                assert simulate_partition(profiles, shape, moved).seconds >= found.seconds * (1 - 1e-9)
    assert fits(profiles, shape, found.cuts, cap)
    assert simulate_partition(profiles, shape, found.cuts).seconds == pytest.approx(found.seconds)


DOCUMENT = Path(__file__).parents[3] / "docs" / "reports" / "predictions.md"
GAIN = re.compile(r"\d\.\d\d")


def test_the_documented_table_is_the_simulated_one() -> None:
    documented = DOCUMENT.read_text().splitlines()
    header, _, *rows = table(32)
    start = documented.index(header) + 2
    for ours, theirs in zip(rows, documented[start:], strict=False):
        assert GAIN.sub("", ours) == GAIN.sub("", theirs)
        assert [float(gain) for gain in GAIN.findall(theirs)] == pytest.approx(
            [float(gain) for gain in GAIN.findall(ours)], abs=0.02
        )
