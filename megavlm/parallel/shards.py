"""Map the shard of a parameter that a data-parallel rank holds to boxes of the global tensors, for checkpoints.

A parameter of one tensor-parallel rank consists of one or more slices of global tensors, given by the model's
`sharded_state_dict`; the first layer of a gated MLP has two slices, and padding is in none. Each data-parallel rank
holds consecutive elements of the parameter: whole rows (ZeRO-2 and 3), or its share of a bucket (ZeRO-1). These
elements are a few boxes of the parameter. A checkpoint needs only the position of these boxes in the global tensors, so
that nothing is gathered for a save.

megatron-core's `fully_reshardable`, whose files have the same keys, shapes and types, gathers every bucket on every
data-parallel rank: 12 bytes of host memory for each of the rank's unsharded parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from torch import Tensor
from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class Box:
    """A rectangular part of a tensor: first index and length along each axis."""

    offset: tuple[int, ...]
    size: tuple[int, ...]


def boxes(shape: tuple[int, ...], start: int, end: int) -> Iterator[Box]:
    """Divide the elements `start` … `end − 1` (in row-major order) of a tensor into boxes, and yield them in order.

    There are at most 2·d − 1 boxes for d axes: the end of a row, whole rows, and the beginning of a row. Both partial
    rows are divided recursively.
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
    """A slice of a parameter, from index `first` on, and the part of a global tensor to which it corresponds."""

    first: tuple[int, ...]
    part: ShardedTensor  # without data

    def within(self, box: Box) -> Box | None:
        """Return the intersection of the slice with a box of the parameter; None if it is empty."""
        ends = [
            (max(at, low), min(at + size, low + length))
            for at, size, low, length in zip(box.offset, box.size, self.first, self.part.local_shape, strict=True)
        ]
        if any(start >= end for start, end in ends):
            return None
        return Box(tuple(start for start, _ in ends), tuple(end - start for start, end in ends))


@dataclass(frozen=True)
class ShardPlace:
    """A box of a global tensor, and the position of its elements in this rank's shard: offset `first` and strides."""

    part: ShardedTensor  # without data
    box: Box
    first: int
    stride: tuple[int, ...]

    def view(self, held: Tensor) -> Tensor:
        """Return the box as a view of `held`, the contiguous elements of the parameter that this rank holds."""
        return held.as_strided(self.box.size, self.stride, held.storage_offset() + self.first)


@dataclass(frozen=True)
class ShardLayout:
    """Slices of a parameter of `shape`, and the range `start` … `end − 1` of its elements that this rank holds.

    `key` is the global name of the parameter's entry in the sharded state dict. A parameter that is only padding has no
    slices.
    """

    key: str
    shape: tuple[int, ...]
    slices: tuple[Slice, ...]
    start: int
    end: int
    replica: int  # this rank's index among the ranks that hold the same elements; index 0 saves them

    def places(self) -> Iterator[ShardPlace]:
        """Yield the boxes of global tensors that this rank holds, with their positions in its shard."""
        at = 0
        for box in boxes(self.shape, self.start, self.end):
            stride = tuple(prod(box.size[axis + 1 :]) for axis in range(len(box.size)))
            for each in self.slices:
                common = each.within(box)
                if common is not None:
                    inside = (
                        step * (place - origin)
                        for step, place, origin in zip(stride, common.offset, box.offset, strict=True)
                    )
                    starts = zip(common.offset, each.first, each.part.global_offset, strict=True)
                    offset = tuple(place - origin + target for place, origin, target in starts)
                    yield ShardPlace(each.part, Box(offset, common.size), at + sum(inside), stride)
            at += prod(box.size)

    def parts(self, held: Tensor, *, prefix: str = "") -> Iterator[ShardedTensor]:
        """Yield this rank's shard as sharded tensors for megatron-core's checkpoints; their data are views of `held`.

        `prefix` is prepended to the tensors' names.
        """
        for place in self.places():
            part, data = place.part, place.view(held.detach())
            yield replace(
                part,
                key=prefix + part.key,
                data=data,
                dtype=data.dtype,
                local_shape=place.box.size,
                global_offset=place.box.offset,
                axis_fragmentations=None,  # not a grid: boxes differ in size
                replica_id=(*part.replica_id[:2], self.replica),
            )


@dataclass(frozen=True)
class ParamShard:
    """A trained parameter, the layout of this rank's shard, and the shard's fp32 weights and moments (`state`)."""

    param: Tensor
    layout: ShardLayout
    state: Mapping[str, Tensor]


def shard_layout(entry: ShardedTensor | ShardedTensorFactory, start: int, end: int, *, replica: int) -> ShardLayout:
    """Return the layout of elements `start` … `end − 1` of a parameter, given its entry in a sharded state dict."""
    return ShardLayout(entry.key, tuple(entry.data.shape), tuple(_slices(entry)), start, end, replica)


def rows_of(shape: torch.Size, *, rank: int, ranks: int) -> tuple[int, int]:
    """Return the element range (start, end) of a rank's shard in `fully_shard`: ⌈rows / ranks⌉ rows, the last fewer."""
    count, *others = shape
    each = -(-count // ranks)
    return min(rank * each, count) * prod(others), min((rank + 1) * each, count) * prod(others)


def _slices(entry: ShardedTensor | ShardedTensorFactory) -> Iterator[Slice]:
    shape = entry.data.shape
    if isinstance(entry, ShardedTensor):
        yield Slice((0,) * len(shape), entry.without_data())
        return
    # Apply the factory to tensors of row and column indices: the results give the origin of each slice.
    numbered = []
    for axis, count in enumerate(shape):
        numbers = torch.arange(count).view(*(-1 if other == axis else 1 for other in range(len(shape))))
        numbered.append(replace(entry, data=numbers.expand(shape)).build())
    for parts in zip(*numbered, strict=True):
        yield Slice(tuple(int(part.data[(0,) * len(shape)]) for part in parts), parts[0].without_data())


def local_part(tensor: Any) -> Tensor:
    """Return the local tensor of a DTensor, or the tensor itself if it is plain; detached from autograd."""
    with torch.no_grad():
        part: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()
    return part
