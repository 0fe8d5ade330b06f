"""Copy a rank's state into host memory that it shares with the process that writes its checkpoints.

The memory has no name in any file system (`memfd`), so it is gone with the two processes and no limit of /dev/shm
applies. It is kept for the next save. For a GPU it is pinned, so that copies run at the speed of the bus.
"""

from __future__ import annotations

import io
import math
import mmap
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex

from megavlm.backend.host_copies import pin as pin_memory
from megavlm.backend.host_copies import unpin
from megavlm.checkpoint.tensor_files import Item

_ALIGNMENT = 64  # bytes: of every element type, and of a cache line


@dataclass(frozen=True)
class Place:
    """The offset and size, in bytes, of an item in the shared memory. `dtype` is None if the item is no tensor."""

    index: MetadataIndex
    offset: int
    bytes: int
    dtype: torch.dtype | None
    shape: tuple[int, ...]


Places = Mapping[str, Sequence[Place]]  # by file


class Staging:
    """The shared memory of a rank."""

    def __init__(self) -> None:
        self._memory: mmap.mmap | None = None
        self._pinned = 0  # address of the memory if it is pinned
        self.file = -1
        self.bytes = 0

    def copy(self, files: Mapping[str, Sequence[Item]]) -> Places:
        """Copy items into the memory, wait until the copies are done, and return where each item is."""
        places: dict[str, list[Place]] = {}
        end = 0
        for name, items in files.items():
            places[name] = []
            for index, data in items:
                place = _place(index, data, end)
                places[name].append(place)
                end = math.ceil((place.offset + place.bytes) / _ALIGNMENT) * _ALIGNMENT
        tensors = [data for items in files.values() for _, data in items if isinstance(data, torch.Tensor)]
        on_gpu = any(tensor.is_cuda for tensor in tensors)
        self._reserve(end, pin=on_gpu)
        for name, items in files.items():
            for (_, data), place in zip(items, places[name], strict=True):
                if isinstance(data, torch.Tensor):
                    if data.numel():
                        view(self._memory, place).copy_(data.detach(), non_blocking=True)
                elif self._memory is not None:
                    self._memory[place.offset : place.offset + place.bytes] = data.getvalue()
        if on_gpu:
            torch.cuda.synchronize()
        return places

    def close(self) -> None:
        """Free the memory; what is mapped by others stays until they free it."""
        if self._pinned:
            unpin(self._pinned)
        if self.file >= 0:
            os.close(self.file)
        self._memory, self._pinned, self.file, self.bytes = None, 0, -1, 0

    def _reserve(self, size: int, *, pin: bool) -> None:
        if size <= self.bytes:
            return
        self.close()
        file = os.memfd_create("megavlm-checkpoint", os.MFD_CLOEXEC)
        try:
            os.ftruncate(file, size)
            self._memory = mmap.mmap(file, size)
        except OSError:
            os.close(file)
            raise
        self.file, self.bytes = file, size
        if pin:
            address = torch.frombuffer(self._memory, dtype=torch.uint8, count=1).data_ptr()
            if pin_memory(address, size):
                self._pinned = address


def view(memory: mmap.mmap | None, place: Place) -> torch.Tensor:
    """Return a tensor at its place in the memory."""
    assert place.dtype is not None
    if not place.bytes or memory is None:
        return torch.empty(place.shape, dtype=place.dtype)
    flat = torch.frombuffer(memory, dtype=torch.uint8, count=place.bytes, offset=place.offset)
    return flat.view(place.dtype).view(place.shape)


def items_at(memory: mmap.mmap | None, places: Places) -> dict[str, list[Item]]:
    """Return the items of files as they are in the memory; tensors are not copied."""
    return {
        name: [
            (
                each.index,
                view(memory, each)
                if each.dtype is not None
                else io.BytesIO(b"" if memory is None else memory[each.offset : each.offset + each.bytes]),
            )
            for each in of_file
        ]
        for name, of_file in places.items()
    }


def _place(index: MetadataIndex, data: torch.Tensor | io.BytesIO, offset: int) -> Place:
    if isinstance(data, torch.Tensor):
        return Place(index, offset, data.numel() * data.itemsize, data.dtype, tuple(data.shape))
    return Place(index, offset, data.getbuffer().nbytes, None, ())
