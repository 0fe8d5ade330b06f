"""Which rows of which Hugging Face tensors make up each of ours: one declaration, read in both directions. No torch.

Every difference between the two sides is an order of rows: megatron-core fuses query, key and value per key/value
head, and gate over up; the trailing dimensions agree once a convolution's are flattened. (`Transpose` is the one
exception.) So a `Rule` names their
tensors and gives, for our tensor of some shape, the spans of their rows that it consists of, first row first. Reading
a slice of ours means reading parts of spans; writing theirs means cutting ours at the same places.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Protocol

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Span:
    """`rows` consecutive rows of the tensor `name`, from row `start` on."""

    name: str
    start: int
    rows: int


class Rule(Protocol):
    """How one of our tensors consists of theirs."""

    @property
    def names(self) -> tuple[str, ...]:
        """Their tensors; each belongs to one rule, which uses all of it."""
        ...

    def spans(self, shape: Shape) -> list[Span]:
        """Their rows, in the order of ours. `shape` is ours, without padding for TP."""
        ...

    def their_shapes(self, shape: Shape) -> dict[str, Shape]:
        """What their tensors look like in a file."""
        ...


Table = dict[str, Rule]  # by our global name


@dataclass(frozen=True)
class Rename:
    """The same rows under another name; `view` is their shape where it differs from ours (conv weights, [1, 1, H])."""

    name: str
    view: Shape | None = None

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name,)

    def spans(self, shape: Shape) -> list[Span]:
        return [Span(self.name, 0, shape[0])]

    def their_shapes(self, shape: Shape) -> dict[str, Shape]:
        return {self.name: self.view or shape}


@dataclass(frozen=True)
class Transpose:
    """A matrix of theirs whose columns are our rows (Gemma's projector). It is read and written in one piece."""

    name: str

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name,)

    def spans(self, shape: Shape) -> list[Span]:
        """Rows of the transposed matrix."""
        return [Span(self.name, 0, shape[0])]

    def their_shapes(self, shape: Shape) -> dict[str, Shape]:
        return {self.name: (shape[1], shape[0])}


@dataclass(frozen=True)
class Concat:
    """Tensors of equal height on top of each other: gate, then up."""

    names: tuple[str, ...]

    def spans(self, shape: Shape) -> list[Span]:
        return [Span(name, 0, shape[0] // len(self.names)) for name in self.names]

    def their_shapes(self, shape: Shape) -> dict[str, Shape]:
        return {span.name: (span.rows, *shape[1:]) for span in self.spans(shape)}


@dataclass(frozen=True)
class QKV:
    """Query, key and value apart; ours holds for each of `groups` key/value heads its queries, its key, its value.

    With N query heads of width D in G groups: G · (N/G·D + D + D) rows.
    """

    pattern: str  # their names, with {} for q, k and v
    groups: int
    head_width: int

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.pattern.format(part) for part in "qkv")

    def spans(self, shape: Shape) -> list[Span]:
        width = self.head_width
        query, key, value = self.names
        queries = shape[0] // self.groups - 2 * width  # rows of one group's query heads
        groups = (
            (
                Span(query, group * queries, queries),
                Span(key, group * width, width),
                Span(value, group * width, width),
            )
            for group in range(self.groups)
        )
        return list(chain.from_iterable(groups))

    def their_shapes(self, shape: Shape) -> dict[str, Shape]:
        return _heights(self.spans(shape), shape)


@dataclass(frozen=True)
class FusedQKV:
    """Theirs is [all queries; all keys; all values] of equally many heads in one tensor."""

    name: str
    heads: int

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name,)

    def spans(self, shape: Shape) -> list[Span]:
        third, width = shape[0] // 3, shape[0] // (3 * self.heads)
        return [Span(self.name, part * third + head * width, width) for head in range(self.heads) for part in range(3)]

    def their_shapes(self, shape: Shape) -> dict[str, Shape]:
        return {self.name: shape}


def _heights(spans: list[Span], shape: Shape) -> dict[str, Shape]:
    rows: dict[str, int] = {}
    for span in spans:
        rows[span.name] = rows.get(span.name, 0) + span.rows
    return {name: (height, *shape[1:]) for name, height in rows.items()}


@dataclass(frozen=True)
class Piece:
    """Where a run of our rows comes from: rows `ours` of a slice are rows `theirs` of the tensor `name`."""

    name: str
    ours: slice
    theirs: slice


def pieces(spans: list[Span], start: int, stop: int) -> Iterator[Piece]:
    """Cut spans to our rows [start, stop); `ours` counts from `start`. Rows past the spans (padding) have no piece."""
    first = 0
    for span in spans:
        low, high = max(start, first), min(stop, first + span.rows)
        if low < high:
            shift = span.start - first
            yield Piece(span.name, slice(low - start, high - start), slice(low + shift, high + shift))
        first += span.rows


def fits(found: Shape, expected: Shape) -> bool:
    """Whether a file's shape is the expected one, but for dimensions of size one."""
    return [n for n in found if n != 1] == [n for n in expected if n != 1] and math.prod(found) == math.prod(expected)


def module(ours: str, theirs: str, *leaves: str) -> Table:
    """A module under two names, with these of its parameters."""
    return {f"{ours}.{leaf}": Rename(f"{theirs}.{leaf}") for leaf in leaves}


def linear(ours: str, theirs: str, *, bias: bool) -> Table:
    """A linear layer or LayerNorm."""
    return module(ours, theirs, *(("weight", "bias") if bias else ("weight",)))
