"""Describe the part of a sharded parameter that a data-parallel rank holds as boxes of the global tensors.

A parameter of one tensor-parallel rank is one or more slices of tensors under global names, as the model's
`sharded_state_dict` says; the first layer of a gated MLP is two. Each data-parallel rank holds consecutive elements of
it: whole rows (ZeRO-2 and 3), or whatever a cut bucket leaves (ZeRO-1). These are a few boxes of the tensor. A
checkpoint needs only their offsets in the global tensor, so that nothing is gathered for a save.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from operator import add

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from torch import Tensor


@dataclass(frozen=True)
class Box:
    """A rectangular part of a tensor: its first index and its length along each axis."""

    offset: tuple[int, ...]
    size: tuple[int, ...]


def boxes(shape: tuple[int, ...], start: int, end: int) -> Iterator[Box]:
    """Yield boxes that hold the elements `start` … `end − 1` (in row-major order) of a tensor, in this order.

    There are at most 2·d − 1 boxes for d axes: the end of a row, whole rows, and the beginning of a row, where the end
    and the beginning are cut in the same way.
    """
    if start >= end:
        return
    if not shape:
        yield Box((), ())
        return
    inner = shape[1:]
    row = prod(inner)
    first, last = -(-start // row), end // row  # whole rows are first … last − 1
    if first > last:
        yield from _in_row(last, inner, start - last * row, end - last * row)
        return
    yield from _in_row(first - 1, inner, start - (first - 1) * row, row)
    if first < last:
        yield Box((first, *(0 for _ in inner)), (last - first, *inner))
    yield from _in_row(last, inner, 0, end - last * row)


def _in_row(number: int, inner: tuple[int, ...], start: int, end: int) -> Iterator[Box]:
    for box in boxes(inner, start, end):
        yield Box((number, *box.offset), (1, *box.size))


@dataclass(frozen=True)
class Slice:
    """The elements of a parameter from element `first` on, and the part of a global tensor that they are."""

    first: int
    part: ShardedTensor  # without data


@dataclass(frozen=True)
class ShardLayout:
    """The slices of a parameter, and the range `start` … `end − 1` of its elements that this rank holds."""

    slices: tuple[Slice, ...]
    start: int
    end: int
    replica: int  # this rank's index among those that hold the same elements; index 0 saves them

    def parts(self, held: Tensor, *, prefix: str = "") -> Iterator[ShardedTensor]:
        """Yield what this rank holds as parts of global tensors; their data are views of `held`.

        `prefix` is put before the tensors' names.
        """
        numbers = held.detach().view(-1)
        for each in self.slices:
            shape, part = each.part.local_shape, each.part
            start, end = max(self.start, each.first), min(self.end, each.first + prod(shape))
            at = start - self.start
            for box in boxes(shape, start - each.first, end - each.first):
                data = numbers[at : at + prod(box.size)].view(box.size)
                at += data.numel()
                yield replace(
                    part,
                    key=prefix + part.key,
                    data=data,
                    dtype=data.dtype,
                    local_shape=box.size,
                    global_offset=tuple(map(add, part.global_offset, box.offset)),
                    axis_fragmentations=None,  # not a grid: boxes differ in size
                    replica_id=(*part.replica_id[:2], self.replica),
                )


@dataclass(frozen=True)
class ParamShard:
    """A trained parameter, the part of it that this rank holds, and that part's fp32 weights and moments (`state`)."""

    param: Tensor
    layout: ShardLayout
    state: Mapping[str, Tensor]


def shard_layout(entry: ShardedTensor | ShardedTensorFactory, start: int, end: int, *, replica: int) -> ShardLayout:
    """Return the layout of elements `start` … `end − 1` of a parameter, given its entry in a sharded state dict."""
    return ShardLayout(tuple(_slices(entry)), start, end, replica)


def rows_of(shape: torch.Size, *, rank: int, ranks: int) -> tuple[int, int]:
    """Return the first element and the end of what `fully_shard` gives a rank: ⌈rows / ranks⌉ rows, the last fewer."""
    count, *others = shape
    each = -(-count // ranks)
    return min(rank * each, count) * prod(others), min((rank + 1) * each, count) * prod(others)


def _slices(entry: ShardedTensor | ShardedTensorFactory) -> Iterator[Slice]:
    if isinstance(entry, ShardedTensor):
        yield Slice(0, entry.without_data())
        return
    # A factory cuts a tensor of row numbers as it cuts the parameter, so the result says which rows went where.
    count, *others = entry.data.shape
    numbers = torch.arange(count).view(-1, *(1 for _ in others)).expand(count, *others)
    for part in replace(entry, data=numbers).build():
        assert part.data.shape[1:] == numbers.shape[1:], "factories cut rows only"
        first = int(part.data[(0,) * part.data.ndim])  # to flatten it would write out what is expanded
        yield Slice(first * prod(others), part.without_data())
