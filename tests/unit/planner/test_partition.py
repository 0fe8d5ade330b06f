"""Cuts against brute force over every partition and every choice of what to recompute."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, product

import numpy as np
import pytest

from megavlm.arch.dims import Dims, ScheduleName
from megavlm.arch.scenario import Recompute, scenario_of
from megavlm.arch.schedules import Held, PipelineShape, held_at_peaks
from megavlm.config.schema import Config
from megavlm.planner.layer_profiles import LayerProfiles, RecomputeProfile
from megavlm.planner.partition import NoPartition, Partition, best_partition, simulate_partition
from megavlm.rules.defaults import resolve


def drawn(seed: int, layers: int) -> LayerProfiles:
    """Random layers: some frozen (no backward), recomputing costs a forward and saves memory."""
    random = np.random.default_rng(seed)

    def prefix(values: np.ndarray) -> np.ndarray:
        return np.concatenate([[0.0], np.cumsum(values)])

    forward = random.uniform(0.2, 2.0, layers)
    backward = forward * random.choice([0, 1, 2], layers)
    saved = random.uniform(1, 4, layers)
    halves = {
        "weight": prefix(np.where(backward == 2 * forward, forward, 0)),
        "waiting": prefix(np.where(backward == 2 * forward, random.uniform(1, 4, layers), 0)),
    }
    return LayerProfiles(
        scenario=scenario_of(resolve(Config()), Dims(1, 1, 1, 1), on_gpu=True),
        first=0,
        forward=prefix(forward),
        model_state=prefix(random.uniform(1, 3, layers)),
        transfer=np.concatenate([[0.0], random.uniform(0, 0.3, layers - 1), [0.0]]),
        modes={
            "none": RecomputeProfile(prefix(backward), prefix(saved), np.zeros(layers), **halves),
            "full": RecomputeProfile(prefix(backward + forward * (backward > 0)), prefix(saved / 4), saved, **halves),
        },
    )


def chunk_bytes(profiles: LayerProfiles, held: Held, a: int, b: int, mode: Recompute) -> tuple[float, float]:
    """The bytes of layers a … b−1: those summed over a rank's chunks, and transient ones (the largest counts)."""
    by_mode = profiles.modes[mode]
    saved, waiting = (float(prefix[b] - prefix[a]) for prefix in (by_mode.saved, profiles.prefix(by_mode.waiting)))
    kept = max(whole * saved + halves * waiting for whole, halves in held)
    return float(profiles.model_state[b] - profiles.model_state[a]) + kept, float(by_mode.transient[a:b].max())


def fits(
    profiles: LayerProfiles, shape: PipelineShape, cuts: tuple[int, ...], modes: tuple[Recompute, ...], cap: float
) -> bool:
    """Whether every rank stays below `cap` bytes."""
    held, bounds = held_at_peaks(shape), (0, *cuts, profiles.count)
    for rank in range(shape.pp):
        parts = [
            chunk_bytes(profiles, held[rank][c // shape.pp], bounds[c], bounds[c + 1], modes[c])
            for c in range(rank, shape.chunks, shape.pp)
        ]
        if sum(kept for kept, _ in parts) + max(peak for _, peak in parts) > cap:
            return False
    return True


def brute_force(profiles: LayerProfiles, shape: PipelineShape, cap: float) -> float:
    """Least simulated seconds over everything that fits; inf where nothing does."""
    best = float("inf")
    for cuts in combinations(range(1, profiles.count), shape.chunks - 1):
        for modes in product(profiles.modes, repeat=shape.chunks):
            if fits(profiles, shape, cuts, modes, cap):
                best = min(best, simulate_partition(profiles, shape, cuts, modes).seconds)
    return best


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
@pytest.mark.parametrize("share", [None, 0.6, 0.4])
def test_finds_what_brute_force_finds(seed: int, layers: int, shape: PipelineShape, share: float | None) -> None:
    profiles = drawn(seed, layers)
    everything = profiles.model_state[-1] + shape.pp * profiles.modes["none"].saved[-1]
    cap = float("inf") if share is None else share * everything
    expected = brute_force(profiles, shape, cap)
    found = best_partition(profiles, shape, cap=cap, simulations=10**6)
    if expected == float("inf"):
        assert found == NoPartition(float("inf"))
        return
    assert isinstance(found, Partition)
    assert found.exact
    assert found.seconds == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_stages_on_other_devices_get_other_layers(seed: int, schedule: ScheduleName) -> None:
    """Ranks 1 and 2 are three times as fast, and rank 1 has hardly any memory."""
    profiles, shape = drawn(seed, 7), PipelineShape(schedule, 3, 1, 5)
    modes = {
        name: replace(mode, backward=mode.backward / 3, weight=mode.weight / 3) for name, mode in profiles.modes.items()
    }
    fast = replace(profiles, forward=profiles.forward / 3, modes=modes)
    mixed = replace(profiles, stages=(profiles, fast, fast))
    assert brute_force(mixed, shape, float("inf")) < brute_force(profiles, shape, float("inf"))
    found = best_partition(mixed, shape, simulations=10**6)
    assert isinstance(found, Partition)
    assert found.exact
    assert found.seconds == pytest.approx(brute_force(mixed, shape, float("inf")), rel=1e-12)
    assert best_partition(mixed, shape, cap=(1e6, 1e-6, 1e6)) == NoPartition(float("inf"))


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    "shape", [PipelineShape("1f1b", 5, 1, 6), PipelineShape("interleaved", 3, 2, 6), PipelineShape("zb-h1", 5, 1, 7)]
)
def test_what_a_short_search_finds_is_a_local_optimum(seed: int, shape: PipelineShape) -> None:
    profiles = drawn(seed, 24)
    cap = 0.5 * float(profiles.model_state[-1] + shape.pp * profiles.modes["none"].saved[-1])
    found = best_partition(profiles, shape, cap=cap, simulations=1)
    assert isinstance(found, Partition)
    assert not found.exact
    assert found.bound <= found.seconds
    bounds = (0, *found.cuts, profiles.count)
    moved = [
        (*found.cuts[:place], cut + step, *found.cuts[place + 1 :])
        for place, cut in enumerate(found.cuts)
        for step in (-3, -2, -1, 1, 2, 3)
        if bounds[place] < cut + step < bounds[place + 2]
    ]
    changed = [
        (found.cuts, (*found.recompute[:place], mode, *found.recompute[place + 1 :]))
        for place in range(shape.chunks)
        for mode in profiles.modes
    ]
    for cuts, modes in [*((cuts, found.recompute) for cuts in moved), *changed]:
        if fits(profiles, shape, cuts, modes, cap):
            assert simulate_partition(profiles, shape, cuts, modes).seconds >= found.seconds * (1 - 1e-9)
    assert fits(profiles, shape, found.cuts, found.recompute, cap)
    assert simulate_partition(profiles, shape, found.cuts, found.recompute).seconds == pytest.approx(found.seconds)
