"""Pinned and shared host memory, and copies between host and device that overlap with computation."""

from __future__ import annotations

import math
import mmap
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
import torch
from torch import Tensor


def empty_on_host(tensor: Tensor) -> Tensor:
    """Return an uninitialised host tensor of the same shape and type; it is pinned (page-locked) if `tensor` is on a
    GPU, so that copies are asynchronous.

    torch caches freed pinned memory, and reuses it only after the copies that use it are done.
    """
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)


class SharedMemory:
    """Host memory that several processes map. It has no name in any file system (`memfd`), so it is gone with the last
    of them, and no limit of /dev/shm applies.
    """

    def __init__(self, file: int | None = None) -> None:
        """Make memory, which is empty, or take part in that of a file descriptor. It grows for all of them."""
        self.file = os.memfd_create("megavlm", os.MFD_CLOEXEC) if file is None else file
        self._memory: mmap.mmap | None = None
        self._address = 0  # of memory that is pinned

    @property
    def bytes(self) -> int:
        """Return the size of what is mapped."""
        return 0 if self._memory is None else len(self._memory)

    def reserve(self, size: int, *, pins: bool = False) -> None:
        """Map at least `size` bytes, and all that others have reserved; pin them for a GPU, if that is possible.

        Tensors that lie in the memory stay as they are, but are no longer pinned.
        """
        if size <= self.bytes:
            return
        self._unmap()
        if (found := os.fstat(self.file).st_size) < size:
            os.ftruncate(self.file, size)
        self._memory = mmap.mmap(self.file, max(size, found))
        if pins and (runtime := torch.cuda.cudart()) is not None:
            address = torch.frombuffer(self._memory, dtype=torch.uint8, count=1).data_ptr()
            if int(runtime.cudaHostRegister(address, self.bytes, 0)) == 0:
                self._address = address

    def tensor(self, offset: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return the tensor at an offset in bytes."""
        size = math.prod(shape) * dtype.itemsize
        if not size or self._memory is None:
            return torch.empty(tuple(shape), dtype=dtype)
        flat = torch.frombuffer(self._memory, dtype=torch.uint8, count=size, offset=offset)
        return flat.view(dtype).view(tuple(shape))

    def lend(self, then: Callable[[], object], *, pins: bool = False) -> Tensor:
        """Return the whole reserved memory as a tensor, [bytes] uint8. Once neither it nor a view of it exists, `then`
        is called, in any thread.
        """
        self.reserve(max(1, os.fstat(self.file).st_size), pins=pins)
        assert self._memory is not None
        array = np.frombuffer(self._memory, dtype=np.uint8)
        weakref.finalize(array, then).atexit = False
        return torch.from_numpy(array)

    def close(self) -> None:
        """Free the memory; what others have mapped, and tensors that lie in it, stay until they are freed."""
        self._unmap()
        os.close(self.file)

    def _unmap(self) -> None:
        if self._address:
            torch.cuda.cudart().cudaHostUnregister(self._address)
        self._memory, self._address = None, 0


class SharedMemories:
    """Memories whose content a device reads. One is used again once no tensor refers to it and the device, if it is a
    GPU, has read it; there are as many as are in use at the same time.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._on = torch.get_device_module(device)
        self._free: SimpleQueue[tuple[SharedMemory, Any]] = SimpleQueue()  # with the event that it has been read
        self._closed = threading.Event()

    def take(self) -> SharedMemory:
        """Return memory that is free. Raises OSError if there is none."""
        with suppress(Empty):
            memory, read = self._free.get_nowait()
            if read.query():
                return memory
            self._free.put((memory, read))
        return SharedMemory()

    def lend(self, memory: SharedMemory) -> Tensor:
        """Return all that was reserved of a memory, [bytes] uint8, pinned for a GPU, until no tensor refers to it.

        Raises OSError if it cannot be mapped.
        """
        pins = self._device.type == "cuda"
        # In a new thread the current device is number 0, and pinning memory would create a CUDA context on it.
        with torch.cuda.device(self._device) if pins else nullcontext():
            return memory.lend(partial(self.give_back, memory), pins=pins)

    def give_back(self, memory: SharedMemory) -> None:
        """Let memory be used again: no tensor refers to it, and all copies from it to the device have been launched."""
        read = self._on.Event()
        read.record(self._on.current_stream(self._device))
        self._free.put((memory, read))
        if self._closed.is_set():
            self.close()

    def close(self) -> None:
        """Free all memories, each once no tensor refers to it."""
        self._closed.set()
        with suppress(Empty):
            while True:
                self._free.get_nowait()[0].close()


class HostCopies:
    """Copies of contiguous tensors. Computation queued after `wait(ticket)` runs after the ticket's copies.

    On a GPU there is one stream per direction, since each direction has its own copy engine; tickets are events. On a
    CPU, whose streams are torch's stand-ins, copies are synchronous.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._on: Any = torch.get_device_module(device)
        self._out, self._back = self._on.Stream(device), self._on.Stream(device)

    def to_host(self, sources: Sequence[Tensor]) -> tuple[list[Tensor], Any]:
        """Start copies to the host and return the host tensors and a ticket to wait for.

        The copies begin after the computation that is queued so far. `sources` must not change until the wait ends.
        """
        hosts = [empty_on_host(source) for source in sources]
        with self._queued_on(self._out) as copied:
            for host, source in zip(hosts, sources, strict=True):
                host.copy_(source, non_blocking=True)
        return hosts, copied

    def to_device(self, hosts: Sequence[Tensor]) -> tuple[list[Tensor], Any]:
        """Start copies to the device, after the computation queued so far. Returns the tensors and the ticket."""
        # Allocated on the computing stream, which also frees it: `record_stream` is not needed.
        tensors = [torch.empty(host.shape, dtype=host.dtype, device=self.device) for host in hosts]
        with self._queued_on(self._back) as copied:
            for tensor, host in zip(tensors, hosts, strict=True):
                tensor.copy_(host, non_blocking=True)
        return tensors, copied

    def wait(self, ticket: Any) -> None:
        """Let computation that is queued from now on wait for copies."""
        self._on.current_stream(self.device).wait_event(ticket)

    @contextmanager
    def _queued_on(self, stream: Any) -> Iterator[Any]:
        """Queue the copies inside on `stream`, after the current stream's work; the event marks their end."""
        copied = self._on.Event()
        stream.wait_stream(self._on.current_stream(self.device))
        with self._on.stream(stream):
            yield copied
        copied.record(stream)
