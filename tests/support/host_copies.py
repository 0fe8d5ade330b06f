"""Stand-ins for a device's copies: streams that write down what is asked, and copies as late as is allowed."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


class Streams:
    """`torch.cuda`'s streams and events: "computing" is the current one until another is entered."""

    def __init__(self) -> None:
        self.log: list[tuple[str, ...]] = []
        self.current = self.stream_of("computing")
        self.names = iter(("out", "back"))

    def stream_of(self, name: str) -> Any:
        log = self.log

        class Stream:
            def wait_stream(self, other: Any) -> None:
                log.append((name, "waits for", str(other)))

            def wait_event(self, event: Any) -> None:
                log.append((name, "waits for", str(event)))

            def __str__(self) -> str:
                return name

        return Stream()

    def event(self) -> Any:
        log = self.log

        class Event:
            where = ""

            def record(self, stream: Any) -> None:
                self.where = f"copies of {stream}"
                log.append((str(stream), "records"))

            def __str__(self) -> str:
                return self.where

        return Event()

    @contextmanager
    def entered(self, stream: Any) -> Any:
        before, self.current = self.current, stream
        yield
        self.current = before


class LateCopies:
    """A device whose copies are done as late as they may be: when somebody waits for them, in the order of two queues.

    Until then, memory that they fill is full of NaN (bytes 0xFF). Knows what it keeps alive, and what happened.
    """

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.out: list[tuple[Tensor, Tensor]] = []
        self.back: list[tuple[Tensor, Tensor]] = []
        self.done = {"out": 0, "back": 0}
        self.events: list[str] = []
        self.here: weakref.WeakSet[Any] = weakref.WeakSet()
        self.peak = 0
        self.sizes: list[int] = []  # fp32 numbers of what was sent

    def to_host(self, sources: Sequence[Tensor]) -> tuple[list[Tensor], Any]:
        self.here.update(sources)
        self.sizes += [source.numel() // 4 for source in sources]
        hosts = [torch.full_like(source, 255) for source in sources]
        self.out += [(host, source.clone()) for host, source in zip(hosts, sources, strict=True)]
        self._happened("send")
        return hosts, ("out", len(self.out))

    def to_device(self, hosts: Sequence[Tensor]) -> tuple[list[Tensor], Any]:
        tensors = [torch.full_like(host, 255) for host in hosts]
        self.here.update(tensors)
        self.back += list(zip(tensors, hosts, strict=True))
        self._happened("fetch")
        return tensors, ("back", len(self.back))

    def wait(self, ticket: Any) -> None:
        kind, end = ticket
        queue = self.out if kind == "out" else self.back
        for index in range(self.done[kind], end):
            target, source = queue[index]
            target.copy_(source)
            queue[index] = (target[:0].clone(), source[:0].clone())  # let both go
        self.done[kind] = max(self.done[kind], end)
        self._happened("arrived" if kind == "back" else "sent")

    def _happened(self, event: str) -> None:
        self.events.append(event)
        self.peak = max(self.peak, self.bytes_here)

    @property
    def bytes_here(self) -> int:
        return sum(tensor.numel() for tensor in self.here)
