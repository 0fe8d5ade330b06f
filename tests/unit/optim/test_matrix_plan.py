"""Pieces of matrices travel to the rank that owns them, and updates to all ranks that hold any, whoever holds what."""

from __future__ import annotations

from itertools import pairwise, product
from math import prod

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from torch import Tensor

from megavlm.arch.kind import HiddenWeight, hidden_weight
from megavlm.arch.tensor_split import Part, share_of, share_runs
from megavlm.model.rank_parts import laid_out
from megavlm.optim.matrix_plan import HeldBox, Matrix, MatrixPiece, matrices_of, owners_of, plan_rounds
from megavlm.parallel.shards import Box, boxes, shard_layout


@given(st.lists(st.integers(0, 1000), max_size=40), st.integers(1, 9))
def test_matrices_are_spread_evenly(costs: list[int], ranks: int) -> None:
    """No rank has more than the mean, by more than the one matrix that it took last (Graham 1969)."""
    owners = owners_of(costs, ranks)
    loads = [sum(cost for cost, owner in zip(costs, owners, strict=True) if owner == rank) for rank in range(ranks)]
    assert all(0 <= owner < ranks for owner in owners)
    for rank, load in enumerate(loads):
        own = [cost for cost, owner in zip(costs, owners, strict=True) if owner == rank]
        assert load - min(own, default=0) <= min(loads)


WEIGHTS = st.builds(
    hidden_weight,
    st.integers(1, 6),
    st.integers(1, 3),
    st.integers(1, 3),
    periods=st.integers(1, 3),
    experts=st.sampled_from((0, 0, 2, 3)),
)


def shape_of(weight: HiddenWeight, padding: int) -> tuple[int, ...]:
    return (*((weight.experts,) if weight.experts else ()), weight.rows + padding, weight.columns + padding)


def grid(data: st.DataObject, shape: tuple[int, ...]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return boxes that together cover a tensor, which is cut anywhere along each axis."""
    axes = []
    for size in shape:
        cuts = sorted(data.draw(st.sets(st.integers(1, size - 1), max_size=2))) if size > 1 else []
        axes.append([(start, end - start) for start, end in pairwise([0, *cuts, size])])
    return [tuple(zip(*box, strict=True)) for box in product(*axes)]  # type: ignore[misc]


def values_of(matrix: Matrix, tensor: Tensor) -> Tensor:
    """The matrix, row by row."""
    whole = tensor if matrix.expert is None else tensor[matrix.expert]
    first, end = matrix.band.first, matrix.band.first + matrix.band.count
    rows = [row for row in range(matrix.weight.rows) if first <= row % matrix.band.period < end]
    return whole[rows, : matrix.columns]


def view_of(piece: MatrixPiece, box: Box, matrix: Matrix, tensor: Tensor) -> Tensor:
    held = tensor[tuple(slice(start, start + size) for start, size in zip(box.offset, box.size, strict=True))]
    held = held if piece.expert is None else held[piece.expert]
    rows = [piece.row + matrix.band.period * k + i for k in range(piece.periods) for i in range(piece.count)]
    return held[rows, : piece.width]


@settings(max_examples=60)
@given(st.data())
def test_every_matrix_arrives_whole_and_every_holder_gets_its_part_back(data: st.DataObject) -> None:
    """Weights of any shape, padded, cut into any boxes, each box on one rank or on several."""
    ranks = data.draw(st.integers(1, 4))
    weights = {f"w{i}": data.draw(WEIGHTS) for i in range(data.draw(st.integers(1, 3)))}
    padding = data.draw(st.integers(0, 2))
    tensors = {
        key: torch.arange(prod(shape_of(weight, padding)), dtype=torch.float64).view(shape_of(weight, padding)) + 1
        for key, weight in weights.items()
    }
    held: list[list[HeldBox]] = [[] for _ in range(ranks)]
    for key, tensor in tensors.items():
        for offset, size in grid(data, tuple(tensor.shape)):
            for rank in data.draw(st.sets(st.integers(0, ranks - 1), min_size=1)):
                held[rank].append((key, Box(offset, size)))
    matrices = matrices_of(weights)
    most = data.draw(st.integers(1, 60))
    plans = [plan_rounds(held, matrices, rank=rank, most=most) for rank in range(ranks)]
    assert len({len(plan) for plan in plans}) == 1
    assert sorted(index for plan in plans for each in plan for index in each.own) == list(range(len(matrices)))
    for rank, plan in enumerate(plans):
        for number, each in enumerate(plan):
            assert len(each.own) <= 1 or sum(matrices[index].size for index in each.own) <= most
            whole = {index: torch.full((matrices[index].rows, matrices[index].columns), -1.0) for index in each.own}
            for other in range(ranks):
                theirs = plans[other][number]
                assert theirs.gathers_to[rank] == each.gathers_from[other]
                assert theirs.results_from[rank] == each.results_to[other]
                for piece in each.gathers_from[other]:
                    matrix = matrices[piece.matrix]
                    target = whole[piece.matrix][piece.top : piece.top + piece.rows, piece.left :]
                    assert (target[:, : piece.width] == -1).all()  # nothing is sent twice
                    target[:, : piece.width] = view_of(piece, held[other][piece.box][1], matrix, tensors[matrix.key])
            for index, values in whole.items():
                assert torch.equal(values.double(), values_of(matrices[index], tensors[matrices[index].key]))
    # What a rank gets back is each element of its boxes once, and no padding.
    for rank, plan in enumerate(plans):
        got = sum(piece.size for each in plan for pieces in each.results_from for piece in pieces)
        own = sum(
            prod(
                min(start + size, real) - min(start, real)
                for start, size, real in zip(box.offset, box.size, shape_of(weights[key], 0), strict=True)
            )
            for key, box in held[rank]
        )
        assert got == own


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
