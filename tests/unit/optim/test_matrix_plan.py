"""Pieces of matrices travel to the rank that owns them, and updates to all ranks that hold any, whoever holds what."""

from __future__ import annotations

from itertools import pairwise, product
from math import prod

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megavlm.arch.kind import HiddenWeight, hidden_weight
from megavlm.optim.matrix_plan import HeldBox, Matrix, MatrixPiece, matrices_of, owners_of, plan_rounds
from megavlm.parallel.shards import Box


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
