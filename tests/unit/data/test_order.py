"""Every record once per epoch, sources in their shares, and nothing but the seed and the index decides."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megavlm.data.sample_order import BLOCK, Order, RecordRef, apportioned, permuted


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 300), st.text(max_size=4))
def test_a_permutation_reaches_every_number_once(length: int, key: str) -> None:
    assert sorted(permuted(place, length, key=key) for place in range(length)) == list(range(length))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=20), st.integers(20, 5000))
def test_shares_are_kept(weights: list[float], total: int) -> None:
    counts = apportioned(weights, total)
    assert sum(counts) == total
    assert min(counts) >= 1
    spare = total - len(weights)
    for count, weight in zip(counts, weights, strict=True):
        assert abs(count - 1 - weight / sum(weights) * spare) <= 1 + 1e-6


def test_each_epoch_of_a_source_has_every_record_in_another_order() -> None:
    order = Order(lengths=(10, 7), weights=(1.0, 3.0), seed=5)
    places = [order.record(index) for index in range(3 * BLOCK)]
    small = [place for place in places if place.source == 0]
    epochs = [[place.record for place in small if place.epoch == epoch] for epoch in range(20)]
    assert all(sorted(records) == list(range(10)) for records in epochs)
    assert len({tuple(records) for records in epochs}) == 20
    shares = Counter(place.source for place in places[:400])
    assert shares[1] == pytest.approx(300, abs=2), "sources are spread evenly, not one after the other"


@given(st.lists(st.integers(1, 40), min_size=1, max_size=4), st.booleans())
def test_without_weights_an_epoch_has_every_record_of_all_sets_once(lengths: list[int], shuffle: bool) -> None:
    order, total = Order(lengths=tuple(lengths), weights=None, seed=5, shuffle=shuffle), sum(lengths)
    every = [(source, record) for source, length in enumerate(lengths) for record in range(length)]
    for epoch in range(2):
        places = [order.record(index) for index in range(epoch * total, (epoch + 1) * total)]
        assert {place.epoch for place in places} == {epoch}
        assert sorted((place.source, place.record) for place in places) == every
    assert order.shares == [length / total for length in lengths]


def test_one_data_set_is_read_alike_with_a_weight_and_without() -> None:
    """So that runs on one data set go on as they began."""
    given, none = (Order(lengths=(30,), weights=weights, seed=5) for weights in ((2.0,), None))
    assert [given.record(index) for index in range(100)] == [none.record(index) for index in range(100)]


def test_the_seed_and_the_index_decide() -> None:
    first, again, other = (Order(lengths=(1000,), weights=(1.0,), seed=seed) for seed in (1, 1, 2))
    assert [first.record(index) for index in (5, 3, 5)] == [again.record(index) for index in (5, 3, 5)]
    assert [first.record(index) for index in range(9)] != [other.record(index) for index in range(9)]


def test_unshuffled_is_the_order_of_the_files() -> None:
    order = Order(lengths=(3,), weights=(1.0,), seed=1, shuffle=False)
    assert [order.record(index) for index in range(4)] == [
        RecordRef(0, 0, 0),
        RecordRef(0, 1, 0),
        RecordRef(0, 2, 0),
        RecordRef(0, 0, 1),
    ]
