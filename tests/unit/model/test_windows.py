"""Windows of a patch grid: a permutation that keeps each window together, in few runs of equal length."""

from __future__ import annotations

from itertools import groupby

from hypothesis import given
from hypothesis import strategies as st

from megavlm.arch.workload import window_squares
from megavlm.model.vision_ops import window_order

SIDES = st.integers(1, 9)


@given(SIDES, SIDES, st.integers(1, 5))
def test_each_window_is_one_tile(rows: int, columns: int, side: int) -> None:
    order, lengths = window_order((rows, columns), side)
    assert sorted(order.tolist()) == list(range(rows * columns))
    tiles = [
        {(patch // columns // side, patch % columns // side) for patch in span.tolist()}
        for span in order.split(lengths)
    ]
    assert all(len(tile) == 1 for tile in tiles)
    assert len(set.union(*tiles)) == len(tiles) == -(-rows // side) * -(-columns // side)
    assert len(list(groupby(lengths))) <= 4
    assert sum(length**2 for length in lengths) == window_squares((rows, columns), side)
