"""Bytes of tensors that are alive, counted on any device: what the memory model's predictions are checked with."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megavlm.backend.adamw import local


class LiveBytes(TorchDispatchMode):
    """Counts the storages that operations make inside `with`, until they are freed; `peak` is their largest sum.

    `baseline` tensors (weights, gradients, optimizer state) count from the start. Storage shared by views counts once.
    """

    def __init__(self, baseline: list[Tensor]) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known: dict[int, tuple[weakref.ref[Any], int]] = {}
        for tensor in baseline:
            self._meet(tensor)

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self._look_again()
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._meet(leaf)
        return result

    def _meet(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known or not storage.nbytes():
            return
        self._known[key] = (weakref.ref(storage), storage.nbytes())
        self.live += storage.nbytes()
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._forget, key)

    def _look_again(self) -> None:
        """Parameters that data-parallel ranks share come and go by resizing a storage, which no operation shows."""
        for key, (reference, size) in list(self._known.items()):
            storage = reference()
            if storage is not None and storage.nbytes() != size:
                self.live += storage.nbytes() - size
                self._known[key] = (reference, storage.nbytes())
        self.peak = max(self.peak, self.live)

    def _forget(self, key: int) -> None:
        self.live -= self._known.pop(key)[1]


def step_peak(engine: Any, batches: list[Any]) -> int:
    """Most tensor bytes alive during one training step after the first: weights, state and data included."""
    engine.train_step(batches)
    data = [value for batch in batches for value in vars(batch).values() if isinstance(value, Tensor)]
    with LiveBytes([*standing_tensors(engine), *data]) as counter:
        engine.train_step(batches)
    return counter.peak


def standing_tensors(engine: Any) -> list[Tensor]:
    """What lives from step to step: parameters, gradient buffers, optimizer state and master weights."""
    found: list[Tensor] = []
    for chunk in engine.chunks:
        found += [local(param) for param in chunk.parameters()]
        found += [param.main_grad for param in chunk.parameters() if getattr(param, "main_grad", None) is not None]
    for optimizer in getattr(engine.optimizer, "chained_optimizers", [engine.optimizer]):
        inner = optimizer.optimizer
        if inner is None:
            continue
        for group in inner.param_groups:
            found += [local(param) for param in group["params"]]
        found += [value for state in inner.state.values() for value in state.values() if torch.is_tensor(value)]
    return found
