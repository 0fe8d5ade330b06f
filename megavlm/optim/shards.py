"""Which rows of which named tensors a data-parallel rank holds, where ranks share a parameter's rows.

A parameter of one tensor-parallel rank is one or more slices of tensors under global names, as the model's
`sharded_state_dict` says; the first layer of a gated MLP is two. Ranks that share it hold rows of it. Both together say
where in a global tensor a rank's rows lie, which is all that a checkpoint needs: nothing is gathered for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from torch import Tensor


@dataclass(frozen=True)
class Slice:
    """Rows `first` … `first + rows − 1` of a parameter, and the part of a global tensor that they are."""

    first: int
    rows: int
    part: ShardedTensor  # without data


@dataclass(frozen=True)
class Layout:
    """One parameter: its slices, and the rows `start` … `end − 1` that this rank holds."""

    slices: tuple[Slice, ...]
    start: int
    end: int
    replica: int  # which of the ranks that hold the same rows this is: the first writes them

    def parts(self, rows: Tensor, *, prefix: str = "") -> Iterator[ShardedTensor]:
        """This rank's rows as parts of global tensors, whose names get a prefix; their data are views of `rows`."""
        for each in self.slices:
            start, end = max(self.start, each.first), min(self.end, each.first + each.rows)
            if start >= end:
                continue
            data, part = rows[start - self.start : end - self.start], each.part
            first, *others = part.global_offset
            yield replace(
                part,
                key=prefix + part.key,
                data=data,
                dtype=data.dtype,
                local_shape=tuple(data.shape),
                global_offset=(first + start - each.first, *others),
                axis_fragmentations=None,  # not a grid: ranks may hold different numbers of rows
                replica_id=(*part.replica_id[:2], self.replica),
            )


def layout_of(entry: Any, *, rank: int, ranks: int, replica: int) -> Layout:
    """Where rows lie of a parameter (its entry in a sharded state dict) whose rows `ranks` ranks share as torch does:
    all take ⌈rows / ranks⌉, the last ones fewer or none.
    """
    count = entry.data.shape[0]
    each = -(-count // ranks)
    start, end = min(rank * each, count), min((rank + 1) * each, count)
    return Layout(tuple(_slices(entry)), start, end, replica)


def _slices(entry: ShardedTensor | ShardedTensorFactory) -> Iterator[Slice]:
    count, *others = entry.data.shape
    if isinstance(entry, ShardedTensor):
        yield Slice(0, count, entry.without_data())
        return
    # Whatever a factory does with a parameter, it does with the numbers of its rows.
    numbers = torch.arange(count).view(-1, *(1 for _ in others)).expand(count, *others)
    for part in replace(entry, data=numbers).build():
        first = int(part.data.flatten()[0])
        assert part.data.shape[1:] == numbers.shape[1:], "factories cut rows only"
        yield Slice(first, part.data.shape[0], part.without_data())
