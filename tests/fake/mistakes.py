"""What must not pass on a device that is not there: each as a program would make it."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist


def begin() -> None:
    dist.init_process_group("nccl", timeout=timedelta(minutes=1))


def _on_device(*shape: int) -> torch.Tensor:
    return torch.ones(*shape, device="cuda")


def _asks() -> None:
    def train_step() -> float:
        return _on_device(2).sum().item()

    train_step()


def _copies() -> None:
    def train_step() -> torch.Tensor:
        return torch.ones(2).to("cuda")

    train_step()


MISTAKES: dict[str, Callable[[], object]] = {
    "two devices": lambda: _on_device(2) + torch.ones(2),
    "a host's tensor over NCCL": lambda: dist.all_reduce(torch.ones(2)),
    "another size than is sent": lambda: dist.all_gather_into_tensor(_on_device(3), _on_device(2)),
    "a transposed tensor over NCCL": lambda: dist.broadcast(_on_device(2, 3).t(), src=0),
    "asks for a value": _asks,
    "waits for a copy": _copies,
}
