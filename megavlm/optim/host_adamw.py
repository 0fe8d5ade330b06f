"""`--offload optimizer`: Adam's moments in host memory, updated there.

Gradients and master weights stay where they are; for an update they go to the host and the weights come back (12 bytes
a parameter over the bus, a step), in pieces: while the host updates one, the next is on its way, and the one before
goes back. Of the 12 bytes of state that a parameter has under bf16, 8 leave the device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megavlm.backend.host_copies import empty_on_host
from megavlm.optim.adamw import AdamW
from megavlm.optim.lion import Lion
from megavlm.parallel.dtensor import local_part
from megavlm.planner.memory import HOST_PIECE


class OnHost(AdamW):
    """An optimizer whose state is always in host memory. Steps give the same numbers as on a CPU."""

    piece = HOST_PIECE  # numbers that travel together: two pieces in pinned memory take 256 MiB

    def _zeros_like(self, values: Tensor) -> Tensor:
        return torch.zeros(values.shape, dtype=values.dtype)

    def _update(self, group: dict[str, Any], params: list[Tensor]) -> None:
        parts = [
            part for p in params for part in _parts(local_part(p), local_part(p.grad), self._moments(p), self.piece)
        ]
        pieces = [Piece(each) for each in _together(parts, self.piece)]
        divisor = self.divisor_on(torch.device("cpu"))
        pieces[0].send()
        following = [*pieces[1:], None]
        for (piece, moments), after in zip(self._with_moments(pieces), following, strict=True):
            if after is not None:
                after.send()
            piece.arrive()
            self._apply(group, piece.values, piece.gradients, moments, divisor)
            piece.send_back()

    def _moments(self, p: Tensor) -> dict[str, Tensor]:
        state = self.state_of(p)
        return {name: state[name] for name in self.moments}

    def _with_moments(self, pieces: Sequence[Piece]) -> Iterator[tuple[Piece, list[dict[str, Tensor]]]]:
        """Yield each piece with the moments of its parts, which the caller updates in place."""
        for piece in pieces:
            yield piece, [part.moments for part in piece.parts]


class HostAdamW(OnHost):
    """AdamW with its moments on the host."""


class HostLion(OnHost, Lion):
    """Lion with its moment on the host."""


@dataclass(frozen=True)
class _Part:
    """A range of elements of a parameter, at most a piece long."""

    value: Tensor
    gradient: Tensor
    moments: dict[str, Tensor]  # on the host


class Piece:
    """Parts that are copied together, on the device's current stream, which has nothing else to do."""

    def __init__(self, parts: Sequence[_Part]) -> None:
        self.parts = parts
        self.values: list[Tensor] = []
        self.gradients: list[Tensor] = []
        self._sent: Any = None

    @property
    def numbers(self) -> int:
        return sum(part.value.numel() for part in self.parts)

    def send(self) -> None:
        """Start to copy weights and gradients to the host."""
        self.values = [_to_host(part.value) for part in self.parts]
        self.gradients = [_to_host(part.gradient) for part in self.parts]
        device = self.parts[0].value.device
        if device.type == "cuda":
            self._sent = torch.cuda.Event()
            self._sent.record(torch.cuda.current_stream(device))

    def arrive(self) -> None:
        """Wait until they are on the host."""
        if self._sent is not None:
            self._sent.synchronize()

    def send_back(self) -> None:
        """Start to copy the weights back. Pinned memory is not reused before this has finished."""
        for part, value in zip(self.parts, self.values, strict=True):
            part.value.copy_(value, non_blocking=True)
        self.values, self.gradients = [], []


def _parts(value: Tensor, gradient: Tensor, moments: dict[str, Tensor], size: int) -> Iterator[_Part]:
    """Return the parts of a parameter, each at most a piece long."""
    if value.numel() <= size or not (value.is_contiguous() and gradient.is_contiguous()):
        yield _Part(value, gradient, moments)
        return
    flat = {name: moment.view(-1).split(size) for name, moment in moments.items()}
    for index, (values, gradients) in enumerate(
        zip(value.view(-1).split(size), gradient.view(-1).split(size), strict=True)
    ):
        yield _Part(values, gradients, {name: parts[index] for name, parts in flat.items()})


def _together(parts: Sequence[_Part], size: int) -> Iterator[list[_Part]]:
    """Return the parts in order, in groups of at most `size` elements or a single part."""
    group: list[_Part] = []
    numbers = 0
    for part in parts:
        if group and numbers + part.value.numel() > size:
            yield group
            group, numbers = [], 0
        group.append(part)
        numbers += part.value.numel()
    if group:
        yield group


def _to_host(tensor: Tensor) -> Tensor:
    return empty_on_host(tensor).copy_(tensor, non_blocking=True)
