"""Keep the state of an optimizer on the device, in host memory (`--offload optimizer`), or in a file.

With every elementwise rule, gradients and master weights stay on their device. With state on the host, both are copied
there for an update and the weights are copied back (12 bytes per parameter and step over the bus), in pieces: while the
host updates a piece, the next piece is copied to it, and the previous one back.

With `--offload optimizer=nvme:DIR` the host updates with state in a file as with state in its memory. While it updates
one piece, a thread reads the state of the next and another writes that of the one before:

    read      1 │ 2 │ 3 │ 4 │ …
    update        │ 1 │ 2 │ 3 │ …
    write             │ 1 │ 2 │ …

So the state of at most three pieces is in memory: for AdamW, 8 bytes for each of 3 · 2²⁴ numbers.

The file has no name from the start (`O_TMPFILE`, or unlinked as soon as it is open), so nothing is left of a run that
was killed and nothing has to be cleared away. All of it is reserved when it is made: a disk without room says so before
the first step. Numbers are read and written with plain calls, whose failure is an error; `numbers` shows the same bytes
as a tensor that the system pages in and out, for whoever saves and loads them.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megavlm.arch.scenario import HOST_PIECE
from megavlm.backend.host_copies import empty_on_host
from megavlm.errors import ScratchLost, UserError
from megavlm.parallel.shards import local_part


@dataclass(frozen=True)
class Shard:
    """Elements of a parameter that a rank updates, with their gradient and optimizer state."""

    value: Tensor
    gradient: Tensor
    state: dict[str, Tensor]


Apply = Callable[[Sequence[Shard]], None]  # updates shards that are on one device, in place


class StateStore:
    """Optimizer state on the device of the weights."""

    def zeros(self, p: Tensor, name: str) -> Tensor:
        """Return a zero tensor for the state `name` of this rank's shard of a parameter."""
        return torch.zeros_like(local_part(p))

    def update(self, shards: Sequence[Shard], apply: Apply) -> None:
        """Update one or more shards with state in this store."""
        apply(shards)


class HostStore(StateStore):
    """Optimizer state in host memory. Steps give the same numbers as on a CPU."""

    piece = HOST_PIECE  # numbers that travel together: two pieces in pinned memory take 256 MiB

    def zeros(self, p: Tensor, name: str) -> Tensor:
        values = local_part(p)
        return torch.zeros(values.shape, dtype=values.dtype)

    def update(self, shards: Sequence[Shard], apply: Apply) -> None:
        parts = [part for shard in shards for part in _parts(shard, self.piece)]
        pieces = [StatePiece(each) for each in _together(parts, self.piece)]
        pieces[0].send()
        following = [*pieces[1:], None]
        for (piece, states), after in zip(self._with_state(pieces), following, strict=True):
            if after is not None:
                after.send()
            apply(piece.arrived(states))
            piece.send_back()

    def _with_state(self, pieces: Sequence[StatePiece]) -> Iterator[tuple[StatePiece, list[dict[str, Tensor]]]]:
        """Yield each piece with the state of its parts, which the caller updates in place."""
        for piece in pieces:
            yield piece, [part.state for part in piece.parts]


class StatePiece:
    """Parts of shards that are copied together, on the device's current stream, which is otherwise idle."""

    def __init__(self, parts: Sequence[Shard]) -> None:
        """Take `parts`, whose state is on the host."""
        self.parts = parts
        self.values: list[Tensor] = []
        self.gradients: list[Tensor] = []
        self._sent: Any = None

    @property
    def numbers(self) -> int:
        return sum(part.value.numel() for part in self.parts)

    def send(self) -> None:
        """Start to copy weights and gradients to the host."""
        values, gradients = [part.value for part in self.parts], [part.gradient for part in self.parts]
        self.values = [empty_on_host(each).copy_(each, non_blocking=True) for each in values]
        self.gradients = [empty_on_host(each).copy_(each, non_blocking=True) for each in gradients]
        device = self.parts[0].value.device
        on = torch.get_device_module(device)
        self._sent = on.Event()
        self._sent.record(on.current_stream(device))

    def arrived(self, states: Sequence[dict[str, Tensor]]) -> list[Shard]:
        """Wait for the copies of `send`; return the parts on the host, with these states."""
        self._sent.synchronize()
        return [Shard(*each) for each in zip(self.values, self.gradients, states, strict=True)]

    def send_back(self) -> None:
        """Start to copy the weights back. Pinned memory is not reused before the copy has finished."""
        for part, value in zip(self.parts, self.values, strict=True):
            part.value.copy_(value, non_blocking=True)
        self.values, self.gradients = [], []


def _parts(shard: Shard, size: int) -> Iterator[Shard]:
    """Divide a shard into parts of at most `size` elements; a shard that is not contiguous stays whole."""
    if shard.value.numel() <= size or not (shard.value.is_contiguous() and shard.gradient.is_contiguous()):
        yield shard
        return
    flat = {name: numbers.view(-1).split(size) for name, numbers in shard.state.items()}
    both = zip(shard.value.view(-1).split(size), shard.gradient.view(-1).split(size), strict=True)
    for index, (values, gradients) in enumerate(both):
        yield Shard(values, gradients, {name: parts[index] for name, parts in flat.items()})


def _together(parts: Sequence[Shard], size: int) -> Iterator[list[Shard]]:
    """Yield groups of consecutive parts: at most `size` elements each, or a single part."""
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


_EACH = 4  # bytes of a number
_BUFFERS = 3  # being read, updated and written


class DiskStore(HostStore):
    """Optimizer state in a file, visible as tensors that map the file."""

    def __init__(self, folder: Path, params: Sequence[Tensor], names: Sequence[str]) -> None:
        """Make a file for the state tensors `names` of these parameters; other state is in host memory. Raises
        UserError if the disk has no room.
        """
        self._names = names
        self._scratch = Scratch(folder, sum(len(names) * local_part(p).numel() for p in params))
        self._buffers: list[Tensor] = []
        self._places: dict[Tensor, int] = {}  # where a parameter's state begins
        place = 0
        for p in params:
            self._places[p] = place
            place += len(names) * local_part(p).numel()

    def zeros(self, p: Tensor, name: str) -> Tensor:
        if name not in self._names:
            return super().zeros(p, name)
        part = local_part(p)
        start = self._places[p] + self._names.index(name) * part.numel()
        return self._scratch.numbers[start : start + part.numel()].view(part.shape)

    def _with_state(self, pieces: Sequence[StatePiece]) -> Iterator[tuple[StatePiece, list[dict[str, Tensor]]]]:
        self._grow(max(piece.numbers for piece in pieces) * len(self._names))
        with ThreadPoolExecutor(1) as reader, ThreadPoolExecutor(1) as writer:
            writes: list[Future[None]] = []
            ahead = reader.submit(self._read, pieces[0], self._buffers[0])
            for index, piece in enumerate(pieces):
                states = ahead.result()
                if index + 1 < len(pieces):
                    if index >= _BUFFERS - 1:  # the buffer's earlier state has to be on disk
                        writes[index + 1 - _BUFFERS].result()
                    ahead = reader.submit(self._read, pieces[index + 1], self._buffers[(index + 1) % _BUFFERS])
                yield piece, states
                writes.append(writer.submit(self._write, piece, states))
            for write in writes:
                write.result()

    def _grow(self, numbers: int) -> None:
        if not self._buffers or self._buffers[0].numel() < numbers:
            self._buffers = [torch.empty(numbers) for _ in range(_BUFFERS)]

    def _read(self, piece: StatePiece, buffer: Tensor) -> list[dict[str, Tensor]]:
        """Read the state of a piece's parts into a buffer; return it for each part, by name."""
        found, free = [], buffer
        for part in piece.parts:
            state = {}
            for name, on_disk in part.state.items():
                state[name] = free[: on_disk.numel()].view(on_disk.shape)
                free = free[on_disk.numel() :]
                self._scratch.read(int(on_disk.storage_offset()), state[name])
            found.append(state)
        return found

    def _write(self, piece: StatePiece, states: Sequence[dict[str, Tensor]]) -> None:
        for part, updated in zip(piece.parts, states, strict=True):
            for name, on_disk in part.state.items():
                self._scratch.write(int(on_disk.storage_offset()), updated[name])


class Scratch:
    """Unnamed file of `count` fp32 numbers, initially zero, in a folder that is created if missing.

    Raises UserError if the disk has no room or the folder cannot be written to.
    """

    def __init__(self, folder: Path, count: int) -> None:
        self._option = f"--offload optimizer=nvme:{folder}"
        size = count * _EACH
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115
            if size:
                os.posix_fallocate(self._file.fileno(), 0, size)
        except OSError as error:
            raise UserError(
                f"{self._option}: cannot reserve {size / 2**30:.2f} GiB for a rank's moments ({error.strerror}): free "
                "space, or name another folder"
            ) from error
        # The bytes of the file as numbers, mapped: a write to the tensor changes the file, and the reverse.
        self.numbers = torch.empty(0)
        if size:
            self.numbers = torch.frombuffer(mmap.mmap(self._file.fileno(), size), dtype=torch.float32)

    def read(self, start: int, into: Tensor) -> None:
        """Fill a contiguous tensor with the numbers from `start` on. Raises ScratchLost."""
        self._move(os.preadv, start, into)

    def write(self, start: int, numbers: Tensor) -> None:
        """Write a contiguous tensor's numbers from `start` on. Raises ScratchLost."""
        self._move(os.pwritev, start, numbers)

    def _move(self, call: object, start: int, numbers: Tensor) -> None:
        assert callable(call)
        rest, place = memoryview(numbers.view(-1).numpy().data).cast("B"), start * _EACH
        try:
            while rest:  # a call may move less than it was asked to
                moved = call(self._file.fileno(), [rest], place)
                if not moved:
                    raise OSError(0, "the file has become shorter")
                rest, place = rest[moved:], place + moved
        except OSError as error:
            raise ScratchLost(
                f"{self._option} failed in a step ({error.strerror}): the last checkpoint is whole; free space or name "
                "another folder, then resume"
            ) from error
