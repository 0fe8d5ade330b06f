"""Tensors that travel between pipeline ranks, each under the name of the pass that makes it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megavlm.arch.schedules import Pass


class Transfers:
    """The transfers of one step between this rank and others of `group`. None of them is waited for until its tensor
    is needed; both ends of a pair of ranks must begin theirs in one order (`programs.py`).
    """

    def __init__(self, group: dist.ProcessGroup, *, dtype: torch.dtype, device: torch.device) -> None:
        self._group = group
        self._dtype = dtype
        self._device = device
        self._arriving: dict[Pass, tuple[Any, Tensor]] = {}
        self._leaving: dict[Pass, tuple[Any, Tensor]] = {}

    def receive(self, made_by: Pass, size: tuple[int, ...], *, source: int) -> None:
        """Begin to receive what a pass of rank `source` makes."""
        tensor = torch.empty(size, dtype=self._dtype, device=self._device)
        self._arriving[made_by] = dist.irecv(tensor, group=self._group, group_src=source), tensor

    def received(self, made_by: Pass) -> Tensor:
        """Return what was received, once it is there."""
        work, tensor = self._arriving.pop(made_by)
        work.wait()
        return tensor

    def send(self, made_by: Pass, tensor: Tensor, *, target: int) -> None:
        """Begin to send what a pass made. Its memory stays; the tensor itself may be given other memory meanwhile."""
        self._leaving = {each: held for each, held in self._leaving.items() if not held[0].is_completed()}
        kept = tensor.detach().contiguous()
        self._leaving[made_by] = dist.isend(kept, group=self._group, group_dst=target), kept

    def has_arrived(self, made_by: Pass) -> None:
        """Free what was sent, when an answer shows that it has arrived: gloo does not tell."""
        if made_by in self._leaving:
            self._leaving.pop(made_by)[0].wait()

    def finish(self) -> None:
        """Wait until everything that was sent has arrived."""
        for work, _ in self._leaving.values():
            work.wait()
        self._leaving.clear()
