"""Which part of which named tensors a data-parallel rank holds, where ranks share a parameter.

A parameter of one tensor-parallel rank is one or more slices of tensors under global names, as the model's
`sharded_state_dict` says; the first layer of a gated MLP is two. Ranks that share it hold a run of its numbers each:
whole rows (ZeRO-2 and 3), or wherever a bucket was cut (ZeRO-1). A run is a few boxes of the tensor, and where these
lie in the global tensor is all that a checkpoint needs: nothing is gathered for it.
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
    """A part of a tensor: where it begins and how long it is, along each axis."""

    offset: tuple[int, ...]
    size: tuple[int, ...]


def boxes(shape: tuple[int, ...], start: int, end: int) -> Iterator[Box]:
    """Cut the numbers `start` … `end − 1` of a tensor, counted along its rows, into boxes, in this order.

    There are at most 2·d − 1 for d axes: the end of a row, whole rows, and the beginning of a row, and again in both.
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
    """The numbers of a parameter from number `first` on, and the part of a global tensor that they are."""

    first: int
    part: ShardedTensor  # without data


@dataclass(frozen=True)
class ShardLayout:
    """One parameter: its slices, and the numbers `start` … `end − 1` that this rank holds."""

    slices: tuple[Slice, ...]
    start: int
    end: int
    replica: int  # which of the ranks that hold the same numbers this is: the first writes them

    def parts(self, held: Tensor, *, prefix: str = "") -> Iterator[ShardedTensor]:
        """What this rank holds as parts of global tensors, whose names get a prefix; their data are views of `held`."""
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
    """What this rank holds of a trained parameter: where it lies, and fp32 weights (`param`) and moments themselves."""

    param: Tensor
    layout: ShardLayout
    state: Mapping[str, Tensor]


def shard_layout(entry: ShardedTensor | ShardedTensorFactory, start: int, end: int, *, replica: int) -> ShardLayout:
    """Where the numbers `start` … `end − 1` of a parameter lie, by the parameter's entry in a sharded state dict."""
    return ShardLayout(tuple(_slices(entry)), start, end, replica)


def rows_of(shape: torch.Size, *, rank: int, ranks: int) -> tuple[int, int]:
    """The run of numbers that a rank holds where torch shares rows: all take ⌈rows / ranks⌉, the last ones fewer."""
    count, *others = shape
    each = -(-count // ranks)
    return min(rank * each, count) * prod(others), min((rank + 1) * each, count) * prod(others)


def _slices(entry: ShardedTensor | ShardedTensorFactory) -> Iterator[Slice]:
    if isinstance(entry, ShardedTensor):
        yield Slice(0, entry.without_data())
        return
    # Whatever a factory does with a parameter, it does with the numbers of its rows.
    count, *others = entry.data.shape
    numbers = torch.arange(count).view(-1, *(1 for _ in others)).expand(count, *others)
    for part in replace(entry, data=numbers).build():
        assert part.data.shape[1:] == numbers.shape[1:], "factories cut rows only"
        yield Slice(int(part.data.flatten()[0]) * prod(others), part.without_data())
