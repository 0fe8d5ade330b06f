"""Exponential moving averages of fp32 weights (`--ema-decay`), sharded like the rest of the optimizer's state.

    a ← d·a + (1 − d)·θ  after each update; a begins with the first weights

Each rank averages the elements that it updates, so that nothing is exchanged but for an evaluation of the averages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from megavlm.optim.elementwise import AVERAGE
from megavlm.optim.model_weights import give_model
from megavlm.parallel.dtensor import local_part


@torch.no_grad()
def average(optimizer: Any, decay: float) -> None:
    """Let the weights that an optimizer has updated enter their averages."""
    for weights, kept in _pairs(optimizer):
        kept.lerp_(weights.to(kept.device), 1 - decay)


@contextmanager
def averaged(optimizer: Any, chunks: Sequence[Any]) -> Iterator[None]:
    """Return a context in which the model has averaged weights; all ranks enter and leave it. It leaves no trace."""
    _exchange(optimizer, chunks)
    try:
        yield
    finally:
        _exchange(optimizer, chunks)


@torch.no_grad()
def _exchange(optimizer: Any, chunks: Sequence[Any]) -> None:
    """Exchange weights and averages, and give the model the new weights, as at the end of a step."""
    for weights, kept in _pairs(optimizer):
        before = weights.clone()
        weights.copy_(kept)
        kept.copy_(before)
    give_model(optimizer, chunks)


def _pairs(optimizer: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the fp32 weights that this rank updates, each with its average."""
    for part in optimizer.chained_optimizers:
        if not part.is_stub_optimizer:
            inner = part.optimizer
            for weights in (p for group in inner.param_groups for p in group["params"]):
                yield local_part(weights), inner.state_of(weights)[AVERAGE]
