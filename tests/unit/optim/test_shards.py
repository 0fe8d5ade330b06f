""" """

from __future__ import annotations

from itertools import pairwise
from math import prod

import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.dist_checkpointing.mapping import ShardedTensor

from megavlm.arch.tensor_split import Part, share_of, share_runs
from megavlm.model.rank_parts import laid_out
from megavlm.parallel.shards import boxes, shard_layout

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


@given(st.integers(0, 1), st.integers(1, 4), st.integers(1, 5), st.data())
def test_parts_of_all_ranks_are_the_rows_of_the_model(axis: int, tp: int, size: int, data: st.DataObject) -> None:
    """Gate over up, or columns of the layer after them, padded for TP; data-parallel ranks hold runs of elements."""
    blocks, own = 2 - axis, share_of(size, tp)
    whole = torch.full((blocks * size, 3) if axis == 0 else (3, size), -1)
    local_shape = (blocks * own, 3) if axis == 0 else (3, own)
    cuts = sorted(data.draw(st.lists(st.integers(0, prod(local_shape)), max_size=3)))
    for rank in range(tp):
        numbers = 1000 * (rank + 1) + torch.arange(prod(local_shape)).view(local_shape)
        entry = ShardedTensor.from_rank_offsets("weight", numbers, (axis, rank, tp), replica_id=(0, 0, 0))
        part = Part(axis, whole.shape[axis], share_runs(size, tp, rank, blocks=blocks))
        for piece in laid_out(entry, part).build():
            assert (whole[piece.global_slice()] == -1).all()
            whole[piece.global_slice()] = piece.data
        again = torch.full_like(whole, -1)
        for start, end in pairwise([0, *cuts, prod(local_shape)]):
            layout = shard_layout(laid_out(entry, part), start, end, replica=0)
            for piece in layout.parts(numbers.flatten()[start:end].clone()):
                assert (again[piece.global_slice()] == -1).all()
                again[piece.global_slice()] = piece.data
        held = (whole >= 1000 * (rank + 1)) & (whole < 1000 * (rank + 2))
        assert torch.equal(again[held], whole[held])
        assert (again[~held] == -1).all()
    assert (whole >= 1000).all()
