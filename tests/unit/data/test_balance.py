"""Loads are even in every kind of cost, and every rank has as many items."""

from __future__ import annotations

from itertools import combinations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from megavlm.data.packing import assign, imbalance


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 5), st.integers(1, 5), st.integers(0, 2**32 - 1))
def test_every_item_has_one_rank_and_every_rank_as_many(ranks: int, places: int, seed: int) -> None:
    costs = np.random.default_rng(seed).exponential(size=(ranks * places, 2)) * [1, 100]
    assigned = assign(costs, ranks)
    assert [len(items) for items in assigned] == [places] * ranks
    assert sorted(item for items in assigned for item in items) == list(range(ranks * places))


def test_two_ranks_come_near_the_best_possible() -> None:
    found, best = [], []
    for seed in range(20):
        costs = np.random.default_rng(seed).exponential(size=(8, 1))
        halves = [(half, tuple(set(range(8)) - set(half))) for half in combinations(range(8), 4)]
        best.append(min(imbalance(costs[:, 0], half) for half in halves))
        found.append(imbalance(costs[:, 0], assign(costs, 2)))
    assert np.mean(found) <= np.mean(best) * 1.02


def test_both_kinds_are_balanced() -> None:
    rng = np.random.default_rng(1)
    costs = np.stack([rng.exponential(size=256), rng.exponential(size=256)], axis=1)
    assigned, taken_in_turn = assign(costs, 32), np.arange(256).reshape(32, 8)
    for kind in range(2):
        assert imbalance(costs[:, kind], taken_in_turn) > 1.4
        assert imbalance(costs[:, kind], assigned) < 1.1


def test_nothing_to_balance() -> None:
    assert [len(items) for items in assign(np.zeros((4, 2)), 2)] == [2, 2]
    assert imbalance(np.zeros(4), [[0, 1], [2, 3]]) == 1.0
