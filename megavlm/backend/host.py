"""Host memory beside a device's, and copies between the two that run beside what the device computes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor


def host_like(tensor: Tensor) -> Tensor:
    """An uninitialised tensor of the same shape and type in host memory; pinned (page-locked), where the other one is
    on a GPU, so that copies need not wait for the processor.

    torch keeps freed pinned memory for the next tensor, and gives it out only when no copy uses it any more.
    """
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)


class Transfers(Protocol):
    """Copies of contiguous tensors. What is computed after `wait(ticket)` comes after the ticket's copies."""

    kind: str  # of the device: "cuda" or "cpu"

    def send(self, sources: Sequence[Tensor]) -> tuple[list[Tensor], Any]:
        """Begin copies to the host, of what was computed so far; sources stay untouched until they were waited for."""

    def fetch(self, hosts: Sequence[Tensor]) -> tuple[list[Tensor], Any]:
        """Begin copies back to the device, into memory that is free by what was computed so far."""

    def wait(self, ticket: Any) -> None: ...


def transfers_of(device: torch.device) -> Transfers:
    """The copies that a device can make."""
    return StreamTransfers(device) if device.type == "cuda" else DirectTransfers()


class DirectTransfers:
    """On a CPU: copies within one memory, at once."""

    kind = "cpu"

    def send(self, sources: Sequence[Tensor]) -> tuple[list[Tensor], Any]:
        return [host_like(source).copy_(source) for source in sources], None

    def fetch(self, hosts: Sequence[Tensor]) -> tuple[list[Tensor], Any]:
        return [host.clone() for host in hosts], None

    def wait(self, ticket: Any) -> None:
        pass


class StreamTransfers:
    """On a GPU: a stream for each direction, which have copy engines of their own. Tickets are events."""

    kind = "cuda"

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._out, self._back = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def send(self, sources: Sequence[Tensor]) -> tuple[list[Tensor], Any]:
        hosts = [host_like(source) for source in sources]
        with self._beside(self._out) as copied:
            for host, source in zip(hosts, sources, strict=True):
                host.copy_(source, non_blocking=True)
        return hosts, copied

    def fetch(self, hosts: Sequence[Tensor]) -> tuple[list[Tensor], Any]:
        # Memory of the computing stream: it is given out again in that stream's order, and nobody has to record it.
        tensors = [torch.empty(host.shape, dtype=host.dtype, device=self._device) for host in hosts]
        with self._beside(self._back) as copied:
            for tensor, host in zip(tensors, hosts, strict=True):
                tensor.copy_(host, non_blocking=True)
        return tensors, copied

    def wait(self, ticket: Any) -> None:
        torch.cuda.current_stream(self._device).wait_event(ticket)

    @contextmanager
    def _beside(self, stream: Any) -> Iterator[Any]:
        """What is queued inside runs on `stream`, after what the current one has queued; the event says when it has."""
        copied = torch.cuda.Event()
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            yield copied
        copied.record(stream)
