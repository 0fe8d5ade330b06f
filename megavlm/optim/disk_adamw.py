"""`--offload optimizer=nvme:DIR`: Adam's moments on disk; the host updates with them as in `host_adamw`.

While it updates one piece, a thread reads the moments of the next and another writes those of the one before:

    read      1 │ 2 │ 3 │ 4 │ …
    update        │ 1 │ 2 │ 3 │ …
    write             │ 1 │ 2 │ …

So three pieces' moments are in memory, however many there are: 8 bytes of each of 3 · 2²⁴ numbers at most.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from megavlm.optim.host_adamw import HostAdamW, Piece
from megavlm.optim.scratch import Scratch
from megavlm.parallel.dtensor import local_part

_KINDS = ("exp_avg", "exp_avg_sq")
_BUFFERS = 3  # being read, updated and written


class DiskAdamW(HostAdamW):
    """HostAdamW with its state in a file. `state` has tensors that are that file, not memory of the process."""

    _scratch: Scratch | None = None

    def reserve(self, folder: Path) -> None:
        """Make the file. Raises UserError where the disk has no room."""
        params = [p for group in self.param_groups for p in group["params"]]
        self._scratch = Scratch(folder, sum(len(_KINDS) * local_part(p).numel() for p in params))
        self._buffers: list[Tensor] = []
        self._places: dict[Tensor, int] = {}  # where a parameter's moments begin
        place = 0
        for p in params:
            self._places[p] = place
            place += len(_KINDS) * local_part(p).numel()

    def state_of(self, p: Tensor) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[p]
        if not state:
            assert self._scratch is not None
            part, place = local_part(p), self._places[p]
            for index, kind in enumerate(_KINDS):
                start = place + index * part.numel()
                state[kind] = self._scratch.numbers[start : start + part.numel()].view(part.shape)
            self._begin_average(p, state)
        return state

    def _with_moments(self, pieces: Sequence[Piece]) -> Iterator[tuple[Piece, list[dict[str, Tensor]]]]:
        self._grow(max(piece.numbers for piece in pieces) * len(_KINDS))
        with ThreadPoolExecutor(1) as reader, ThreadPoolExecutor(1) as writer:
            writes: list[Future[None]] = []
            ahead = reader.submit(self._read, pieces[0], self._buffers[0])
            for index, piece in enumerate(pieces):
                moments = ahead.result()
                if index + 1 < len(pieces):
                    if index >= _BUFFERS - 1:  # the buffer's earlier moments have to be on disk
                        writes[index + 1 - _BUFFERS].result()
                    ahead = reader.submit(self._read, pieces[index + 1], self._buffers[(index + 1) % _BUFFERS])
                yield piece, moments
                writes.append(writer.submit(self._write, piece, moments))
            for write in writes:
                write.result()

    def _grow(self, numbers: int) -> None:
        if not self._buffers or self._buffers[0].numel() < numbers:
            self._buffers = [torch.empty(numbers) for _ in range(_BUFFERS)]

    def _read(self, piece: Piece, buffer: Tensor) -> list[dict[str, Tensor]]:
        """Return the moments of a piece's parts, read into a buffer."""
        assert self._scratch is not None
        found, free = [], buffer
        for part in piece.parts:
            moments = {}
            for kind, on_disk in part.moments.items():
                moments[kind] = free[: on_disk.numel()].view(on_disk.shape)
                free = free[on_disk.numel() :]
                self._scratch.read(int(on_disk.storage_offset()), moments[kind])
            found.append(moments)
        return found

    def _write(self, piece: Piece, moments: Sequence[dict[str, Tensor]]) -> None:
        assert self._scratch is not None
        for part, updated in zip(piece.parts, moments, strict=True):
            for kind, on_disk in part.moments.items():
                self._scratch.write(int(on_disk.storage_offset()), updated[kind])
