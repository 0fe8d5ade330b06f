from __future__ import annotations

from math import prod

import torch
from hypothesis import given
from hypothesis import strategies as st

from megavlm.optim.shards import boxes

SHAPES = st.lists(st.integers(1, 5), max_size=4).map(tuple)


@given(SHAPES, st.data())
def test_boxes_are_the_numbers_of_a_run_in_order(shape: tuple[int, ...], data: st.DataObject) -> None:
    start = data.draw(st.integers(0, prod(shape)))
    end = data.draw(st.integers(start, prod(shape)))
    numbers = torch.arange(prod(shape)).view(shape)
    found = list(boxes(shape, start, end))
    parts = [
        numbers[tuple(slice(first, first + count) for first, count in zip(box.offset, box.size, strict=True))]
        for box in found
    ]
    assert [tuple(part.shape) for part in parts] == [box.size for box in found]
    assert [int(number) for part in parts for number in part.flatten()] == list(range(start, end))
    assert len(found) <= max(1, 2 * len(shape) - 1)


def test_whole_rows_are_one_box() -> None:
    (box,) = boxes((7, 3, 2), 2 * 6, 5 * 6)
    assert (box.offset, box.size) == ((2, 0, 0), (3, 3, 2))
