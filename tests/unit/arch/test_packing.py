"""Bins hold what they can and few are wasted; loads of ranks are even in every kind of cost."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megavlm.arch.packing import assign, imbalance, pack


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 50).flatmap(lambda size: st.tuples(st.just(size), st.lists(st.integers(1, size), max_size=60))))
def test_every_item_lies_in_one_bin_that_holds_it(given_case: tuple[int, list[int]]) -> None:
    capacity, lengths = given_case
    bins = pack(lengths, capacity)
    assert sorted(item for items in bins for item in items) == list(range(len(lengths)))
    loads = [sum(lengths[item] for item in items) for items in bins]
    assert all(load <= capacity for load in loads)
    assert [items[0] for items in bins] == sorted(items[0] for items in bins)
    # Any two bins hold more than one could: else they would have been one.
    assert all(a + b > capacity for number, a in enumerate(loads) for b in loads[:number])


def test_a_long_tail_fills_sequences() -> None:
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(5.8, 1.0, 2048), 16, 8192).astype(int).tolist()
    assert sum(lengths) / (len(pack(lengths, 8192)) * 8192) > 0.985


@pytest.mark.parametrize("length", [0, 9])
def test_what_no_bin_holds_is_refused(length: int) -> None:
    with pytest.raises(ValueError, match="1 to 8"):
        pack([3, length], 8)


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
