"""Plan which rank orthogonalises each matrix, and which pieces ranks send one another. Pure arithmetic.

Whatever the layout, a rank holds boxes of global tensors (`parallel/shards.py`). A matrix is some rows of such a tensor
(`arch/kind.py`), and so a box holds rectangles of it, its `MatrixPiece`s. The ranks that together hold a pipeline stage
share its matrices: each belongs to one of them, which receives the pieces, computes, and sends the result to all ranks
that hold any. The result depends on the matrix alone, not on who had which piece: it is the same on every layout.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace

from megavlm.arch.kind import Band, HiddenWeight
from megavlm.parallel.shards import Box


@dataclass(frozen=True)
class Matrix:
    """A matrix: the rows `band` of a global tensor, or of its expert `expert` if it has an axis of experts."""

    key: str
    band: Band
    weight: HiddenWeight
    expert: int | None = None

    @property
    def rows(self) -> int:
        return self.band.before(self.weight.rows)

    @property
    def columns(self) -> int:
        return self.weight.columns

    @property
    def size(self) -> int:
        return self.rows * self.columns

    @property
    def cost(self) -> int:
        """Return a relative cost of a Newton-Schulz step (multiplications)."""
        short, long = sorted((self.rows, self.columns))
        return short * short * (2 * long + short)


HeldBox = tuple[str, Box]  # a box of the global tensor of this name, which a rank holds


@dataclass(frozen=True)
class MatrixPiece:
    """A rectangle of matrix number `matrix`, from row `top` and column `left` on, that a rank has in one of its boxes.

    There it is in every `period`-th row from `row` on, `periods` times `count` rows; `expert` is an index into the box.
    """

    matrix: int
    top: int
    left: int
    periods: int
    count: int
    width: int
    box: int
    expert: int | None
    row: int

    @property
    def rows(self) -> int:
        return self.periods * self.count

    @property
    def size(self) -> int:
        return self.rows * self.width

    @property
    def place(self) -> tuple[int, int, int, int, int]:
        return self.matrix, self.top, self.left, self.rows, self.width


@dataclass(frozen=True)
class Round:
    """A rank's work for some of the matrices; all ranks work on a round at the same time.

    This rank sends `gathers_to[r]` to rank r, the owner of the matrices, and receives `gathers_from[r]` from rank r for
    its `own` matrices. `results_to` and `results_from` are the same for updates.
    """

    own: tuple[int, ...]
    gathers_to: tuple[tuple[MatrixPiece, ...], ...]
    gathers_from: tuple[tuple[MatrixPiece, ...], ...]
    results_to: tuple[tuple[MatrixPiece, ...], ...]
    results_from: tuple[tuple[MatrixPiece, ...], ...]


def matrices_of(weights: Mapping[str, HiddenWeight]) -> list[Matrix]:
    """Return the matrices in weights (given by global name), in the same order on every rank."""
    return [
        Matrix(key, band, weight, expert)
        for key, weight in sorted(weights.items())
        for expert in (range(weight.experts) if weight.experts else (None,))
        for band in weight.bands
    ]


def owners_of(costs: Sequence[int], ranks: int) -> list[int]:
    """Return the owner of each matrix: the most costly first, each to the least loaded rank (Graham 1969).

    The fullest rank then takes at most 4/3 − 1/(3·ranks) of the least possible time.
    """
    loads = [(0, rank) for rank in range(ranks)]
    heapify(loads)
    owners = [0] * len(costs)
    for index in sorted(range(len(costs)), key=lambda each: (-costs[each], each)):
        load, rank = loads[0]
        owners[index] = rank
        heapreplace(loads, (load + costs[index], rank))
    return owners


def rounds_of(matrices: Sequence[Matrix], owners: Sequence[int], most: int) -> list[int]:
    """Return the round of each matrix: an owner has at most `most` elements in a round, or a single matrix.

    Matrices of equal shape are consecutive, so that they are computed in one batch.
    """
    found, taken = [0] * len(matrices), defaultdict[int, tuple[int, int]](lambda: (0, 0))
    for index in sorted(range(len(matrices)), key=lambda each: (matrices[each].rows, matrices[each].columns, each)):
        number, size = taken[owners[index]]
        if size and size + matrices[index].size > most:
            number, size = number + 1, 0
        found[index] = number
        taken[owners[index]] = number, size + matrices[index].size
    return found


def pieces_in(boxes: Sequence[HeldBox], matrices: Sequence[Matrix]) -> list[MatrixPiece]:
    """Return the pieces of matrices in a rank's boxes, without padding."""
    by_key = defaultdict[str, list[tuple[int, Matrix]]](list)
    for number, matrix in enumerate(matrices):
        by_key[matrix.key].append((number, matrix))
    return [
        piece
        for index, (key, box) in enumerate(boxes)
        for number, matrix in by_key.get(key, ())
        for piece in _pieces(index, box, number, matrix)
    ]


def _pieces(index: int, box: Box, number: int, matrix: Matrix) -> Iterator[MatrixPiece]:
    *leading, top, left = box.offset
    expert = None
    if matrix.expert is not None:
        expert = matrix.expert - leading[0]
        if not 0 <= expert < box.size[0]:
            return
    end, right = min(top + box.size[-2], matrix.weight.rows), min(left + box.size[-1], matrix.columns)
    if left >= right:
        return
    for row, periods, count in matrix.band.runs(top, end):
        yield MatrixPiece(
            matrix=number,
            top=matrix.band.before(row),
            left=left,
            periods=periods,
            count=count,
            width=right - left,
            box=index,
            expert=expert,
            row=row - top,
        )


def plan_rounds(held: Sequence[Sequence[HeldBox]], matrices: Sequence[Matrix], *, rank: int, most: int) -> list[Round]:
    """Return the rounds of rank `rank`, given the boxes of all ranks. A piece on several ranks is sent by one of them.

    `most` bounds the elements of a rank's own matrices in a round.
    """
    ranks = len(held)
    owners = owners_of([matrix.cost for matrix in matrices], ranks)
    rounds = rounds_of(matrices, owners, most)
    pieces = [pieces_in(boxes, matrices) for boxes in held]
    holders = defaultdict[tuple[int, ...], list[int]](list)
    for other, having in enumerate(pieces):
        for piece in having:
            holders[piece.place].append(other)

    def sender(piece: MatrixPiece) -> int:
        having, owner = holders[piece.place], owners[piece.matrix]
        return owner if owner in having else having[owner % len(having)]

    def chosen(holder: int, owner: int, number: int, *, sends: bool) -> tuple[MatrixPiece, ...]:
        return tuple(
            piece
            for piece in by_owner[holder][owner]
            if rounds[piece.matrix] == number and (not sends or sender(piece) == holder)
        )

    by_owner: list[dict[int, list[MatrixPiece]]] = []
    for having in pieces:
        by_owner.append(defaultdict(list))
        for piece in having:
            by_owner[-1][owners[piece.matrix]].append(piece)
    every = range(ranks)
    return [
        Round(
            own=tuple(i for i in range(len(matrices)) if owners[i] == rank and rounds[i] == number),
            gathers_to=tuple(chosen(rank, other, number, sends=True) for other in every),
            gathers_from=tuple(chosen(other, rank, number, sends=True) for other in every),
            results_to=tuple(chosen(other, rank, number, sends=False) for other in every),
            results_from=tuple(chosen(rank, other, number, sends=False) for other in every),
        )
        for number in range(max(rounds, default=-1) + 1)
    ]
