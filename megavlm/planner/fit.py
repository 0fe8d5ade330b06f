"""Fit the rates of a hardware profile to measured times, for `megavlm calibrate`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from megavlm.planner.hardware import Rates


@dataclass(frozen=True)
class TimedLayer:
    """One pass of a layer: FLOPs of products and of attention, bytes touched, calls, and the seconds that it took."""

    products: float
    attention: float
    traffic: float
    calls: float
    seconds: float


def fit(samples: Sequence[TimedLayer], peak: float | None = None) -> Rates:
    """Return the rates, none negative, with the least squared error over the samples, each error² divided by the time.

    Relative errors alone would let a norm count as much as the layers that a step consists of, absolute ones only the
    largest layer.

    Attention's two products are products, and what stands between them takes time of its own: a FLOP of attention costs
    what a FLOP of products costs, and more. Without this, noise in small layers makes attention free.

    A FLOP costs at least what it does at the device's `peak`, in FLOP/s, where that is known: on a GPU, whose layers
    touch memory in proportion to their products, the rest of the time would else explain all of it.

    Four unknowns (seconds per FLOP of either, more of them per FLOP of attention, per byte, per call): every subset is
    solved for and the best solution without negative numbers is taken, the non-negative least-squares solution.
    """
    weights = np.array([s.seconds for s in samples]) ** -0.5
    least_flop = 0.0 if peak is None else 1 / peak
    spent = np.array([least_flop * (s.products + s.attention) for s in samples])
    target = (np.array([s.seconds for s in samples]) - spent) * weights
    columns = [[s.products + s.attention, s.attention, s.traffic, s.calls] for s in samples]
    rows = np.array(columns, dtype=float) * weights[:, None]
    scale = np.where(rows.max(axis=0) > 0, rows.max(axis=0), 1.0)
    best, least = np.zeros(4), float(np.square(target).sum())
    for size in range(1, 5):
        for chosen in combinations(range(4), size):
            part = (rows / scale)[:, chosen]
            solution = np.linalg.lstsq(part, target, rcond=None)[0]
            error = float(np.square(part @ solution - target).sum())
            if (solution >= 0).all() and error < least * (1 - 1e-12):
                best, least = np.zeros(4), error
                best[list(chosen)] = solution
    flop, more, byte, call = (float(cost) for cost in best / scale)
    flop += least_flop
    products, attention, traffic = (1 / max(cost, 1e-18) for cost in (flop, flop + more, byte))
    return Rates(products, attention, traffic, call)


def predicted(sample: TimedLayer, rates: Rates) -> float:
    """Seconds of a pass by these rates."""
    memory_traffic = sample.traffic / rates.bandwidth + sample.calls * rates.overhead
    return sample.products / rates.matmul + sample.attention / rates.attention + memory_traffic
