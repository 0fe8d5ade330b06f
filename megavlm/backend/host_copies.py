"""Pinned host memory, and copies between host and device that overlap with computation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


def empty_on_host(tensor: Tensor) -> Tensor:
    """Return an uninitialised host tensor of the same shape and type; it is pinned (page-locked) if `tensor` is on a
    GPU, so that copies are asynchronous.

    torch caches freed pinned memory, and reuses it only after the copies that use it are done.
    """
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)


def pin(address: int, size: int) -> bool:
    """Pin memory that torch did not allocate; return whether it is pinned now. Copies from a GPU are then faster."""
    runtime = torch.cuda.cudart()
    return runtime is not None and int(runtime.cudaHostRegister(address, size, 0)) == 0


def unpin(address: int) -> None:
    torch.cuda.cudart().cudaHostUnregister(address)


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
