"""A step of the data as one run of bytes: a description in JSON, then the memory of its tensors.

Nothing in it is code, and whoever reads it finds tensors in place: they are views of the bytes. Pixels stay behind;
their shape and type are described.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from megavlm.data.anyres import TileGroup
from megavlm.data.batch import MicroBatch
from megavlm.data.batch_sampler import Skipped
from megavlm.data.rank_loader import Imbalance, StepData

_ALIGNED = 8  # bytes: where a tensor of any type may begin
_TENSORS = ("tokens", "labels", "loss_mask", "positions", "feature_positions", "cu_seqlens", "sources")


def packed(step: StepData) -> tuple[bytes, list[Tensor]]:
    """(description, tensors in the order in which their memory follows), of which `unpacked` makes the step again."""
    tensors = [tensor for batch in step.batches for _, tensor in _tensors_of(batch)]
    description = {
        "batches": [_described(batch) for batch in step.batches],
        "read": step.read,
        "skipped": [asdict(each) for each in step.skipped],
        "imbalance": None if step.imbalance is None else asdict(step.imbalance),
    }
    return json.dumps(description).encode(), tensors


def size_of(tensors: list[Tensor]) -> int:
    """Bytes that their memory takes, laid out in a row."""
    return sum(room(tensor.numel() * tensor.element_size()) for tensor in tensors)


def lay_out(tensors: list[Tensor], memory: Tensor) -> None:
    """Copy tensors into [bytes] uint8 memory, one after the other."""
    start = 0
    for tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        memory[start : start + size].copy_(tensor.contiguous().flatten().view(torch.uint8))
        start += room(size)


def unpacked(description: bytes, memory: Tensor) -> StepData:
    """The step whose tensors lie in [bytes] uint8 memory. Where it had pixels, there are tensors without memory."""
    told = json.loads(description)
    row = _Row(memory)
    imbalance = told["imbalance"]
    return StepData(
        batches=[_batch(batch, row) for batch in told["batches"]],
        read=told["read"],
        skipped=tuple(Skipped(**each) for each in told["skipped"]),
        imbalance=None if imbalance is None else Imbalance(**imbalance),
    )


def _described(batch: MicroBatch) -> dict[str, Any]:
    patches = batch.patches
    return {
        "tensors": [(name, _dtype(tensor), list(tensor.shape)) for name, tensor in _tensors_of(batch)],
        "patches": None if patches is None else (_dtype(patches), list(patches.shape)),
        "grids": batch.grids,
        "tile_groups": [(group.grid, group.size) for group in batch.tile_groups],
        "lengths": batch.lengths,
    }


def _batch(told: dict[str, Any], row: _Row) -> MicroBatch:
    tensors: dict[str, Any] = {name: row.next(getattr(torch, dtype), shape) for name, dtype, shape in told["tensors"]}
    patches = None
    if told["patches"] is not None:
        dtype, shape = told["patches"]
        patches = torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
    return MicroBatch(
        **tensors,
        patches=patches,
        grids=tuple((rows, columns) for rows, columns in told["grids"]),
        tile_groups=tuple(TileGroup(grid=tuple(grid), size=tuple(size)) for grid, size in told["tile_groups"]),
        lengths=tuple(told["lengths"]),
    )


class _Row:
    """Tensors that lie one after the other in [bytes] uint8 memory."""

    def __init__(self, memory: Tensor) -> None:
        self._rest = memory

    def next(self, dtype: torch.dtype, shape: list[int]) -> Tensor:
        size = torch.Size(shape).numel() * dtype.itemsize
        found, self._rest = self._rest[:size], self._rest[room(size) :]
        return found.view(dtype).view(shape)


def _tensors_of(batch: MicroBatch) -> Iterator[tuple[str, Tensor]]:
    return ((name, value) for name in _TENSORS if isinstance(value := getattr(batch, name), Tensor))


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def room(size: int) -> int:
    """Bytes that so many take, so that a tensor may begin behind them."""
    return -(-size // _ALIGNED) * _ALIGNED
