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
    """Host memory that several processes map. It has no name in any file system (`memfd`), so it is freed with the last
    process that maps it, and no limit of /dev/shm applies.
    """

    def __init__(self, file: int | None = None) -> None:
        """Create empty memory, or share the memory of a file descriptor. `reserve` grows it for all processes."""
        self.file = os.memfd_create("megavlm", os.MFD_CLOEXEC) if file is None else file
        self._memory: mmap.mmap | None = None
        self._address = 0  # address of pinned memory; 0: not pinned

    @property
    def bytes(self) -> int:
        """Return the number of bytes that this process has mapped."""
        return 0 if self._memory is None else len(self._memory)

    def reserve(self, size: int, *, pins: bool = False) -> None:
        """Map at least `size` bytes, and all bytes that other processes have reserved; with `pins`, try to pin them.

        Existing tensors in the memory stay valid, but are no longer pinned.
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
        """Return a tensor of this shape and type that is a view of the memory from `offset` (bytes) on."""
        size = math.prod(shape) * dtype.itemsize
        if not size or self._memory is None:
            return torch.empty(tuple(shape), dtype=dtype)
        flat = torch.frombuffer(self._memory, dtype=torch.uint8, count=size, offset=offset)
        return flat.view(dtype).view(tuple(shape))

    def lend(self, then: Callable[[], object], *, pins: bool = False) -> Tensor:
        """Return the whole reserved memory as a tensor, [bytes] uint8. Once the tensor and all its views are freed,
        `then` is called, in any thread.
        """
        self.reserve(max(1, os.fstat(self.file).st_size), pins=pins)
        assert self._memory is not None
        array = np.frombuffer(self._memory, dtype=np.uint8)
        weakref.finalize(array, then).atexit = False
        return torch.from_numpy(array)

    def close(self) -> None:
        """Unmap the memory and close its file descriptor; other processes' mappings and existing tensors stay valid."""
        self._unmap()
        os.close(self.file)

    def _unmap(self) -> None:
        if self._address:
            torch.cuda.cudart().cudaHostUnregister(self._address)
        self._memory, self._address = None, 0


class SharedMemories:
    """Pool of shared memories from which data is copied to a device. A memory is reused once no tensor refers to it and
    its copies to the GPU are done; the pool grows to the largest number in use at the same time.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._on = torch.get_device_module(device)
        self._free: SimpleQueue[tuple[SharedMemory, Any]] = SimpleQueue()  # with an event after its copies
        self._closed = threading.Event()

    def take(self) -> SharedMemory:
        """Return a free memory, or a new one if none is free. Raises OSError if it cannot be created."""
        with suppress(Empty):
            memory, read = self._free.get_nowait()
            if read.query():
                return memory
            self._free.put((memory, read))
        return SharedMemory()

    def lend(self, memory: SharedMemory) -> Tensor:
        """Return a memory's reserved bytes as a tensor, [bytes] uint8, pinned for a GPU. Once no tensor refers to the
        memory, it returns to the pool.

        Raises OSError if the memory cannot be mapped.
        """
        pins = self._device.type == "cuda"
        # In a new thread the current device is number 0, and pinning memory would create a CUDA context on it.
        with torch.cuda.device(self._device) if pins else nullcontext():
            return memory.lend(partial(self.give_back, memory), pins=pins)

    def give_back(self, memory: SharedMemory) -> None:
        """Return a memory to the pool; no tensor refers to it, and all copies from it to the device are launched."""
        read = self._on.Event()
        read.record(self._on.current_stream(self._device))
        self._free.put((memory, read))
        if self._closed.is_set():
            self.close()

    def close(self) -> None:
        """Close all memories; memories in use are closed once no tensor refers to them."""
        self._closed.set()
        with suppress(Empty):
            while True:
                self._free.get_nowait()[0].close()


class HostCopies:
    """Asynchronous copies of contiguous tensors between host and device.

    Computation queued after `wait(ticket)` runs after the ticket's copies. On a GPU there is one stream per direction,
    since each direction has its own copy engine; tickets are events. On a CPU, whose streams are torch's stand-ins,
    copies are synchronous.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._on: Any = torch.get_device_module(device)
        self._out, self._back = self._on.Stream(device), self._on.Stream(device)

    def to_host(self, sources: Sequence[Tensor]) -> tuple[list[Tensor], Any]:
        """Start copies to the host, after the computation queued so far; return the host tensors and the ticket.

        `sources` must not change until the copies are done.
        """
        hosts = [empty_on_host(source) for source in sources]
        with self._queued_on(self._out) as copied:
            for host, source in zip(hosts, sources, strict=True):
                host.copy_(source, non_blocking=True)
        return hosts, copied

    def to_device(self, hosts: Sequence[Tensor]) -> tuple[list[Tensor], Any]:
        """Start copies to the device, after the computation queued so far; return the tensors and the ticket."""
        # Allocated on the computing stream, which also frees it: `record_stream` is not needed.
        tensors = [torch.empty(host.shape, dtype=host.dtype, device=self.device) for host in hosts]
        with self._queued_on(self._back) as copied:
            for tensor, host in zip(tensors, hosts, strict=True):
                tensor.copy_(host, non_blocking=True)
        return tensors, copied

    def wait(self, ticket: Any) -> None:
        """Let computation that is queued from now on wait for the copies of `ticket`."""
        self._on.current_stream(self.device).wait_event(ticket)

    @contextmanager
    def _queued_on(self, stream: Any) -> Iterator[Any]:
        """Return a context that queues copies on `stream`, after the current stream's work, and yields their event."""
        copied = self._on.Event()
        stream.wait_stream(self._on.current_stream(self.device))
        with self._on.stream(stream):
            yield copied
        copied.record(stream)
