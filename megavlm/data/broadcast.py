"""Broadcast the data of a step from the rank of a model replica that reads to the others.

A step is serialised as a description in JSON followed by the memory of its tensors: nothing is pickled, and the
receiver's tensors are views of the bytes that arrived. Pixels are sent separately, to the ranks that need them; the
message contains their shape and type.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from megavlm.arch.anyres import TileGroup
from megavlm.data.batch import MicroBatch
from megavlm.data.types import Imbalance, LoaderState, Skipped, StepData
from megavlm.errors import UserError

_ALIGNMENT = 8  # bytes: the alignment of a tensor of any type
_TENSORS = ("tokens", "labels", "loss_mask", "positions", "feature_positions", "cu_seqlens", "sources")

# Returns, for a step's micro-batches, the rows of each rank's patches among all of their patches.
PatchShards = Callable[[Sequence[MicroBatch]], Sequence[NDArray[np.int64]]]


@dataclass(frozen=True)
class ReplicaBroadcast:
    """Broadcasts steps within a model replica.

    The first rank of `replica` reads. `vision_group` are its ranks that need pixels, the reader first; None on a rank
    that needs none. If each rank needs other patches, `patch_shards` returns the rows of each rank, ascending; a
    micro-batch then holds this rank's patches only.
    """

    replica: dist.ProcessGroup
    vision_group: dist.ProcessGroup | None
    device: torch.device
    patch_dim: int
    patch_shards: PatchShards | None = None

    @property
    def reads(self) -> bool:
        return self.replica.rank() == 0

    def share(self, read: Callable[[], StepData]) -> StepData:
        """Return the step that the replica's first rank reads, on every rank, in host memory.

        With `patch_shards` each rank has its patches already; else `vision_group` receives them when a micro-batch is
        copied to the device. A UserError of the reader is raised on every rank, so that no rank waits for its data.
        """
        if self.replica.size() == 1:
            return read()
        step: StepData | None = None
        message = ""
        if self.reads:
            try:
                step = read()
            except UserError as error:
                message = str(error)
        received = self._broadcast(step, message)
        if isinstance(received, UserError):
            raise received
        return self._with_pixels(received if step is None else step)

    def share_state(self, state: LoaderState | None) -> LoaderState:
        """Return the reader's state on every rank. It pickles, and is called for checkpoints only."""
        shared = [state]
        if self.replica.size() > 1:
            dist.broadcast_object_list(shared, group=self.replica, group_src=0, device=self.device)
        assert shared[0] is not None
        return shared[0]

    def _broadcast(self, step: StepData | None, error: str) -> StepData | UserError:
        """Return the reader's step or error, sent as a header of fixed size and a message. The host waits for both."""
        description, tensors = serialize(step) if step is not None else (error.encode(), [])
        header = torch.tensor([step is not None, len(description), size_of(tensors)])
        is_step, text_bytes, tensor_bytes = self._from_reader(header).tolist()
        start = aligned(text_bytes)
        message = torch.empty(start + tensor_bytes, dtype=torch.uint8, pin_memory=self.device.type == "cuda")
        if self.reads:
            message[:text_bytes] = torch.frombuffer(bytearray(description), dtype=torch.uint8)
            copy_to(message[start:], tensors)
        message = self._from_reader(message)
        text = message[:text_bytes].numpy().tobytes()
        return deserialize(text, message[start:]) if is_step else UserError(text.decode())

    def _from_reader(self, values: Tensor) -> Tensor:
        """Return the reader's values in the host memory of every rank."""
        on_device = values.to(self.device, non_blocking=True)
        dist.broadcast(on_device, group=self.replica, group_src=0)
        return values if self.reads else values.copy_(on_device)

    def _with_pixels(self, step: StepData) -> StepData:
        if self.vision_group is None:
            return replace(step, batches=[replace(batch, patches=None) for batch in step.batches])
        if self.patch_shards is not None:
            return replace(step, batches=self._scatter(step.batches, self.patch_shards(step.batches)))
        if self.vision_group.size() == 1:
            return step
        return replace(step, batches=[replace(batch, vision_group=self.vision_group) for batch in step.batches])

    def _scatter(self, batches: Sequence[MicroBatch], shards: Sequence[NDArray[np.int64]]) -> list[MicroBatch]:
        """Return the batches with this rank's patches. The reader sends them, one micro-batch at a time."""
        ends = np.cumsum([batch.num_patches for batch in batches])
        cuts = [np.searchsorted(shard, ends[:-1]) for shard in shards]
        parts = [np.split(shard, cut) for shard, cut in zip(shards, cuts, strict=True)]
        found = []
        for index, batch in enumerate(batches):
            rows = [part[index] - (ends[index] - batch.num_patches) for part in parts]
            found.append(replace(batch, patches=self._scatter_patches(batch, rows)))
        return found

    def _scatter_patches(self, batch: MicroBatch, rows: Sequence[NDArray[np.int64]]) -> Tensor:
        """Return this rank's patches [P', D] of a micro-batch; `rows` lists those of every rank."""
        assert batch.patches is not None
        mine = len(rows[self.replica.rank()])
        outgoing = torch.empty(0, self.patch_dim, dtype=batch.patches.dtype, device=self.device)
        sent = [0] * len(rows)
        if self.reads:
            order = torch.from_numpy(np.concatenate(rows)).to(self.device, non_blocking=True)
            outgoing = batch.patches.to(self.device, non_blocking=True).index_select(0, order)
            sent = [len(each) for each in rows]
        received = [mine if rank == 0 else 0 for rank in range(len(rows))]
        patches = outgoing.new_empty(mine, self.patch_dim)
        dist.all_to_all_single(patches, outgoing, received, sent, group=self.replica)
        return patches


def serialize(step: StepData) -> tuple[bytes, list[Tensor]]:
    """Return the description of a step, and the tensors whose memory follows it; `deserialize` is the inverse."""
    tensors = [tensor for batch in step.batches for _, tensor in _tensors_of(batch)]
    description = {
        "batches": [_described(batch) for batch in step.batches],
        "read": step.read,
        "skipped": [asdict(each) for each in step.skipped],
        "imbalance": None if step.imbalance is None else asdict(step.imbalance),
    }
    return json.dumps(description).encode(), tensors


def size_of(tensors: list[Tensor]) -> int:
    """Return the bytes of the tensors, each padded to the alignment."""
    return sum(aligned(tensor.numel() * tensor.element_size()) for tensor in tensors)


def copy_to(memory: Tensor, tensors: list[Tensor]) -> None:
    """Copy tensors to [bytes] uint8 memory, one after the other."""
    start = 0
    for tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        memory[start : start + size].copy_(tensor.contiguous().flatten().view(torch.uint8))
        start += aligned(size)


def deserialize(description: bytes, memory: Tensor) -> StepData:
    """Return the step whose tensors lie in [bytes] uint8 memory. Its patches have a shape and no memory ("meta")."""
    fields = json.loads(description)
    reader = _Reader(memory)
    imbalance = fields["imbalance"]
    return StepData(
        batches=[_batch(batch, reader) for batch in fields["batches"]],
        read=fields["read"],
        skipped=tuple(Skipped(**each) for each in fields["skipped"]),
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


def _batch(fields: dict[str, Any], reader: _Reader) -> MicroBatch:
    tensors: dict[str, Any] = {
        name: reader.next(getattr(torch, dtype), shape) for name, dtype, shape in fields["tensors"]
    }
    patches = None
    if fields["patches"] is not None:
        dtype, shape = fields["patches"]
        patches = torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
    return MicroBatch(
        **tensors,
        patches=patches,
        grids=tuple((rows, columns) for rows, columns in fields["grids"]),
        tile_groups=tuple(TileGroup(grid=tuple(grid), size=tuple(size)) for grid, size in fields["tile_groups"]),
        lengths=tuple(fields["lengths"]),
    )


class _Reader:
    """Reads consecutive tensors from [bytes] uint8 memory."""

    def __init__(self, memory: Tensor) -> None:
        self._rest = memory

    def next(self, dtype: torch.dtype, shape: list[int]) -> Tensor:
        size = torch.Size(shape).numel() * dtype.itemsize
        found, self._rest = self._rest[:size], self._rest[aligned(size) :]
        return found.view(dtype).view(shape)


def _tensors_of(batch: MicroBatch) -> Iterator[tuple[str, Tensor]]:
    return ((name, value) for name in _TENSORS if isinstance(value := getattr(batch, name), Tensor))


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def aligned(size: int) -> int:
    """Return `size` rounded up to the alignment."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT
