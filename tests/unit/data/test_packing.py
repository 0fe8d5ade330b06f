"""Bins hold what they can, every item lies in one, and few are wasted."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megavlm.data.packing import pack


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
    bins = pack(lengths, 8192)
    assert sum(lengths) / (len(bins) * 8192) > 0.985


@pytest.mark.parametrize("length", [0, 9])
def test_what_no_bin_holds_is_refused(length: int) -> None:
    with pytest.raises(ValueError, match="1 to 8"):
        pack([3, length], 8)
