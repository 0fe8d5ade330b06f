"""Rules that declare which rows of which Hugging Face tensors make up each megatron-core tensor.

Reading, writing, LoRA's names and the list of missing tensors follow from these rules. No torch.

Both formats differ in names and in the order of rows: megatron-core fuses query, key and value per key/value head,
and gate over up. The trailing dimensions agree once those of a convolution are flattened. (`Transpose`,
`TransposeEach` and `Interleaved` are the exceptions.) So a `Rule` names the Hugging Face tensors and gives, for a
megatron-core tensor of a given shape, the ranges of Hugging Face rows that make it up, first row first. A slice of the
megatron-core tensor is read from parts of these ranges, and a Hugging Face tensor is written from the same parts.
`Stack` has a rule for each expert.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

Shape = tuple[int, ...]


@dataclass(frozen=True)
class HFRows:
    """`count` consecutive rows of the Hugging Face tensor `name`, from row `start` on; without a name, zeros."""

    name: str
    start: int
    count: int


class Rule(Protocol):
    """Interface of a rule: how one megatron-core tensor is assembled from Hugging Face tensors."""

    @property
    def hf_names(self) -> tuple[str, ...]:
        """Return the names of the Hugging Face tensors. Each tensor belongs to one rule, which uses all of its rows."""
        ...

    def hf_rows(self, shape: Shape) -> list[HFRows]:
        """Return the Hugging Face rows, in order, of a megatron-core tensor of this shape (without padding)."""
        ...

    def hf_shapes(self, shape: Shape) -> dict[str, Shape]:
        """Return the shape of each Hugging Face tensor, by name, for a megatron-core tensor of this shape."""
        ...


Table = dict[str, Rule]  # by megatron-core name


def _shapes(rows: list[HFRows], columns: Shape) -> dict[str, Shape]:
    """Return the shape of each tensor that `rows` cover entirely; a single row has the shape `columns`."""
    heights = Counter[str]()
    for each in rows:
        heights[each.name] += each.count
    return {name: (height, *columns) for name, height in heights.items() if name}


@dataclass(frozen=True)
class _OneTensor:
    hf_name: str

    @property
    def hf_names(self) -> tuple[str, ...]:
        return (self.hf_name,)

    def hf_rows(self, shape: Shape) -> list[HFRows]:
        """Return all rows of the tensor as one range; in a tensor of experts, a row is an expert's matrix."""
        return [HFRows(self.hf_name, 0, shape[0])]


@dataclass(frozen=True)
class Rename(_OneTensor):
    """Rule for the same rows under another name; `view` is the tensor's shape in the file if it differs.

    Shapes differ for convolution weights and for [1, 1, H].
    """

    view: Shape | None = None

    def hf_shapes(self, shape: Shape) -> dict[str, Shape]:
        return {self.hf_name: self.view or shape}


@dataclass(frozen=True)
class Transpose(_OneTensor):
    """Rule for a tensor whose first two dimensions the file has in the other order (Gemma's projector). It is read and
    written in one piece. A vector is such a tensor of `columns` columns, row after row, in the file (Gemma 4's pixels).
    """

    columns: int = 0

    def hf_shapes(self, shape: Shape) -> dict[str, Shape]:
        return {self.hf_name: shape if self.columns else (shape[1], shape[0], *shape[2:])}


@dataclass(frozen=True)
class TransposeEach(_OneTensor):
    """Rule for experts' matrices that the file stores transposed; `view` is the shape in the file (Qwen3-VL-MoE)."""

    view: Shape

    def hf_shapes(self, shape: Shape) -> dict[str, Shape]:
        return {self.hf_name: (shape[0], shape[2], shape[1])}


@dataclass(frozen=True)
class Interleaved(_OneTensor):
    """Rule for experts' gates over ups, whose outputs the file has last and in turn, gate and up (gpt-oss).

    `view` is the shape in the file: [experts, inputs, 2 · width], or [experts, 2 · width] of biases.
    """

    view: Shape

    def hf_shapes(self, shape: Shape) -> dict[str, Shape]:
        return {self.hf_name: (shape[0], *shape[:0:-1])}


@dataclass(frozen=True)
class ChannelsLast(_OneTensor):
    """Rule for a matrix whose columns the file orders by pixel, then channel, and the model by channel, then pixel.

    A pixel may be a frame of `each` columns.
    """

    channels: int
    each: int = 1

    def hf_shapes(self, shape: Shape) -> dict[str, Shape]:
        return {self.hf_name: shape}


@dataclass(frozen=True)
class Stack:
    """Rule for a tensor whose first dimension is experts, which the file stores separately: one rule per expert."""

    rules: tuple[Rule, ...]

    @property
    def hf_names(self) -> tuple[str, ...]:
        return tuple(name for rule in self.rules for name in rule.hf_names)

    def hf_rows(self, shape: Shape) -> list[HFRows]:
        """Return the rows of each expert in turn, for the tensor with its first two dimensions joined."""
        return [rows for rule in self.rules for rows in rule.hf_rows(shape[1:])]

    def hf_shapes(self, shape: Shape) -> dict[str, Shape]:
        return {name: found for rule in self.rules for name, found in rule.hf_shapes(shape[1:]).items()}


@dataclass(frozen=True)
class Concat:
    """Rule that concatenates tensors with the same number of rows: gate, then up."""

    hf_names: tuple[str, ...]

    def hf_rows(self, shape: Shape) -> list[HFRows]:
        return [HFRows(name, 0, shape[0] // len(self.hf_names)) for name in self.hf_names]

    def hf_shapes(self, shape: Shape) -> dict[str, Shape]:
        return {rows.name: (rows.count, *shape[1:]) for rows in self.hf_rows(shape)}


@dataclass(frozen=True)
class QKV:
    """Rule that fuses query, key and value tensors: queries, key and value of each of `groups` key/value heads.

    With N query heads of width D in G groups: G · (N/G·D + D + D) rows; `parts` "qk" has no values. `order` says for
    each row of a query's or key's head which row of the head it is in the file; empty: the same. Rows of the parts
    `missing` are zeros and in no file: softmax does not depend on a bias of keys. `gated`: each query head is followed
    by the rows of a head that gates its output, of a tensor of their own.
    """

    hf_pattern: str  # names with {} for q, k and v
    groups: int
    head_width: int
    parts: str = "qkv"
    order: tuple[int, ...] = ()
    missing: str = ""
    gated: bool = False

    @property
    def hf_names(self) -> tuple[str, ...]:
        gate = ("gate",) * self.gated
        return tuple(self.hf_pattern.format(part) for part in (*self.parts, *gate) if part not in self.missing)

    def hf_rows(self, shape: Shape) -> list[HFRows]:
        width = self.head_width
        query, *others = (self.hf_pattern.format(part) if part not in self.missing else "" for part in self.parts)
        queries = shape[0] // self.groups - len(others) * width  # rows of one group's query heads
        rows = []
        for group in range(self.groups):
            if self.gated:
                heads = range(group * queries // 2, (group + 1) * queries // 2, width)
                gate = self.hf_pattern.format("gate")
                rows += [HFRows(name, head, width) for head in heads for name in (query, gate)]
            else:
                rows += self._of_heads(query, group * queries, queries)
            rows += self._of_heads(others[0], group * width, width)
            rows += [HFRows(name, group * width, width) for name in others[1:]]
        return rows

    def _of_heads(self, name: str, start: int, count: int) -> list[HFRows]:
        if not self.order:
            return [HFRows(name, start, count)]
        heads = range(start, start + count, self.head_width)
        return [HFRows(name, head + row, 1) for head in heads for row in self.order]

    def hf_shapes(self, shape: Shape) -> dict[str, Shape]:
        return _shapes(self.hf_rows(shape), shape[1:])


@dataclass(frozen=True)
class Share:
    """Rows of a Hugging Face tensor for a group of heads: `count` rows, from `start + group · count` on."""

    hf_name: str
    count: int
    start: int = 0


@dataclass(frozen=True)
class Grouped:
    """Rule that interleaves tensors of all heads: for each of `groups` groups of heads, its `shares` in order.

    `columns` is the shape of a row in the files if it differs (convolution weights).
    """

    shares: tuple[Share, ...]
    groups: int
    columns: Shape | None = None

    @property
    def hf_names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(share.hf_name for share in self.shares))

    def hf_rows(self, shape: Shape) -> list[HFRows]:
        return [
            HFRows(share.hf_name, share.start + group * share.count, share.count)
            for group in range(self.groups)
            for share in self.shares
        ]

    def hf_shapes(self, shape: Shape) -> dict[str, Shape]:
        return _shapes(self.hf_rows(shape), self.columns or shape[1:])


@dataclass(frozen=True)
class FusedQKV(_OneTensor):
    """Rule for one tensor [all queries; all keys; all values]; `groups`: key/value heads if fewer than query heads."""

    heads: int
    groups: int | None = None

    @property
    def counts(self) -> tuple[int, int, int]:
        """Return the numbers of query, key and value heads."""
        groups = self.groups or self.heads
        return self.heads, groups, groups

    def hf_rows(self, shape: Shape) -> list[HFRows]:
        _, groups, _ = self.counts
        width, each = shape[0] // sum(self.counts), self.heads // groups
        firsts = tuple(accumulate(self.counts, initial=0))
        return [
            HFRows(self.hf_name, (first + group * count) * width, count * width)
            for group in range(groups)
            for first, count in zip(firsts, (each, 1, 1), strict=False)
        ]

    def hf_shapes(self, shape: Shape) -> dict[str, Shape]:
        return {self.hf_name: shape}


@dataclass(frozen=True)
class RowPair:
    """Equal rows in both formats: `rows` of a slice of a megatron-core tensor, and `hf_rows` of tensor `hf_name`."""

    hf_name: str
    rows: slice
    hf_rows: slice


def row_pairs(hf_rows: list[HFRows], start: int, stop: int) -> Iterator[RowPair]:
    """Yield the pairs of equal rows for a slice [start, stop) of a megatron-core tensor made up of `hf_rows`.

    Row numbers of the slice count from `start`; rows past `hf_rows` are padding and are in no pair, as are zeros.
    """
    first = 0
    for each in hf_rows:
        low, high = max(start, first), min(stop, first + each.count)
        if low < high and each.name:
            shift = each.start - first
            yield RowPair(each.name, slice(low - start, high - start), slice(low + shift, high + shift))
        first += each.count


def fits(found: Shape, expected: Shape) -> bool:
    """Return whether a file's shape is the expected one, ignoring dimensions of size one."""
    return [n for n in found if n != 1] == [n for n in expected if n != 1] and math.prod(found) == math.prod(expected)


def matches(table: Table, found: Mapping[str, Shape]) -> int:
    """Return how many tensors of a table are in a file; where a rule has a `view`, the shape must match it."""
    views = ((name, getattr(rule, "view", None)) for rule in table.values() for name in rule.hf_names)
    return sum(name in found and (view is None or fits(found[name], view)) for name, view in views)


def module(name: str, hf_name: str, *leaves: str) -> Table:
    """Return the table of a module whose parameters `leaves` have the same names in files."""
    return {f"{name}.{leaf}": Rename(f"{hf_name}.{leaf}") for leaf in leaves}


def linear(name: str, hf_name: str, *, bias: bool) -> Table:
    """Return the table of a linear layer or a LayerNorm."""
    return module(name, hf_name, *(("weight", "bias") if bias else ("weight",)))


def gated(name: str, hf_name: str, *, bias: bool) -> Table:
    """Return the table of a gated MLP called `name` here and `hf_name` in files."""
    gate_and_up: Table = {
        f"{name}.linear_fc1.{leaf}": Concat((f"{hf_name}.gate_proj.{leaf}", f"{hf_name}.up_proj.{leaf}"))
        for leaf in (("weight", "bias") if bias else ("weight",))
    }
    return gate_and_up | linear(f"{name}.linear_fc2", f"{hf_name}.down_proj", bias=bias)
