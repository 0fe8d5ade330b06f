"""Where the state of an optimizer is: on the device, or in host memory (`--offload optimizer`).

Whatever the elementwise rule, gradients and master weights stay where they are. With state on the host they go there
for an update and the weights come back (12 bytes a parameter over the bus, a step), in pieces: while the host updates
one, the next is on its way, and the one before goes back. `optim/disk_store.py` has state on a disk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megavlm.arch.scenario import HOST_PIECE
from megavlm.backend.host_copies import empty_on_host
from megavlm.parallel.shards import local_part


@dataclass(frozen=True)
class Shard:
    """Elements of a parameter that a rank updates, with their gradient and the rule's state of them."""

    value: Tensor
    gradient: Tensor
    state: dict[str, Tensor]


Apply = Callable[[Sequence[Shard]], None]  # updates shards that are on one device, in place


class StateStore:
    """State on the device that has the weights."""

    def zeros(self, p: Tensor, name: str) -> Tensor:
        """Return memory for what is called `name` of a parameter's elements that this rank updates, all zeros."""
        return torch.zeros_like(local_part(p))

    def update(self, shards: Sequence[Shard], apply: Apply) -> None:
        """Update shards, one or more, whose state is in this store."""
        apply(shards)


class HostStore(StateStore):
    """State in host memory. Steps give the same numbers as on a CPU."""

    piece = HOST_PIECE  # numbers that travel together: two pieces in pinned memory take 256 MiB

    def zeros(self, p: Tensor, name: str) -> Tensor:
        values = local_part(p)
        return torch.zeros(values.shape, dtype=values.dtype)

    def update(self, shards: Sequence[Shard], apply: Apply) -> None:
        parts = [part for shard in shards for part in _parts(shard, self.piece)]
        pieces = [Piece(each) for each in _together(parts, self.piece)]
        pieces[0].send()
        following = [*pieces[1:], None]
        for (piece, states), after in zip(self._with_state(pieces), following, strict=True):
            if after is not None:
                after.send()
            apply(piece.arrived(states))
            piece.send_back()

    def _with_state(self, pieces: Sequence[Piece]) -> Iterator[tuple[Piece, list[dict[str, Tensor]]]]:
        """Yield each piece with the state of its parts, which the caller updates in place."""
        for piece in pieces:
            yield piece, [part.state for part in piece.parts]


class Piece:
    """Parts that are copied together, on the device's current stream, which has nothing else to do."""

    def __init__(self, parts: Sequence[Shard]) -> None:
        """`parts` have their state on the host."""
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

    def arrived(self, states: Sequence[dict[str, Tensor]]) -> list[Shard]:
        """Wait until they are on the host; return them with these states."""
        if self._sent is not None:
            self._sent.synchronize()
        return [Shard(*each) for each in zip(self.values, self.gradients, states, strict=True)]

    def send_back(self) -> None:
        """Start to copy the weights back. Pinned memory is not reused before this has finished."""
        for part, value in zip(self.parts, self.values, strict=True):
            part.value.copy_(value, non_blocking=True)
        self.values, self.gradients = [], []


def _parts(shard: Shard, size: int) -> Iterator[Shard]:
    """Return the parts of a shard, each at most a piece long."""
    if shard.value.numel() <= size or not (shard.value.is_contiguous() and shard.gradient.is_contiguous()):
        yield shard
        return
    flat = {name: numbers.view(-1).split(size) for name, numbers in shard.state.items()}
    both = zip(shard.value.view(-1).split(size), shard.gradient.view(-1).split(size), strict=True)
    for index, (values, gradients) in enumerate(both):
        yield Shard(values, gradients, {name: parts[index] for name, parts in flat.items()})


def _together(parts: Sequence[Shard], size: int) -> Iterator[list[Shard]]:
    """Return the parts in order, in groups of at most `size` elements or a single part."""
    group: list[Shard] = []
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
