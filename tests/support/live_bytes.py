"""Count the bytes of live tensors on any device, to check the memory model's predictions."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megavlm.optim.stores import HostStore
from megavlm.parallel.shards import local_part


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of storages from their allocation inside `with` until they are freed; `peak` is the maximum.

    `baseline` tensors (weights, gradients, optimizer state) count from the start. Views share one count.
    Offloaded tensors (`host`, and those allocated by a function wrapped in `on_host`) are counted separately, even if
    the device is the host.
    """

    def __init__(self, baseline: Sequence[Tensor], *, host: Sequence[Tensor] = ()) -> None:
        super().__init__()
        self.live = self.peak = 0
        self.host_live = self.host_peak = 0
        self._on_host = False
        self._known: dict[int, tuple[weakref.ref[Any], int, bool]] = {}
        self.on_host(self._meet_all)(host)
        self._meet_all(baseline)

    def on_host(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function wrapped so that its allocations count as host memory."""

        def call(*args: Any, **kwargs: Any) -> Any:
            self._on_host = True
            try:
                return function(*args, **kwargs)
            finally:
                self._on_host = False

        return call

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self._look_again()
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._meet(leaf)
        return result

    def _meet_all(self, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            self._meet(tensor)

    def _meet(self, tensor: Tensor) -> None:
        storage = local_part(tensor).untyped_storage()  # a DTensor's own says the size of the whole, and is no memory
        key = storage._cdata
        if key in self._known or not storage.nbytes() or tensor.is_meta:
            return
        self._known[key] = (weakref.ref(storage), storage.nbytes(), self._on_host)
        self._add(storage.nbytes(), on_host=self._on_host)
        weakref.finalize(storage, self._forget, key)

    def _add(self, size: int, *, on_host: bool) -> None:
        if on_host:
            self.host_live += size
        else:
            self.live += size
        self.peak, self.host_peak = max(self.peak, self.live), max(self.host_peak, self.host_live)

    def _look_again(self) -> None:
        """Update sizes: sharded parameters are freed and gathered by resizing a storage, which is no operation."""
        for key, (reference, size, on_host) in list(self._known.items()):
            storage = reference()
            if storage is not None and storage.nbytes() != size:
                self._add(storage.nbytes() - size, on_host=on_host)
                self._known[key] = (reference, storage.nbytes(), on_host)

    def _forget(self, key: int) -> None:
        _, size, on_host = self._known.pop(key)
        self._add(-size, on_host=on_host)


def step_peak(engine: Any, batches: list[Any]) -> int:
    """Return the peak bytes of live tensors in the second training step, with weights, state and data."""
    return step_counts(engine, batches).peak


def step_counts(
    engine: Any, batches: list[Any], around: Callable[[LiveBytes], AbstractContextManager[Any]] = nullcontext
) -> LiveBytes:
    """Return the counter of the second training step, which runs within `around(counter)`."""
    engine.train_step(batches)
    data = [value for batch in batches for value in vars(batch).values() if isinstance(value, Tensor)]
    sharded = [chunk for chunk in engine.model_chunks if getattr(chunk, "rows_on_host", False)]
    rows = [local_part(param) for chunk in sharded for param in chunk.parameters()]
    updated_there = [inner for inner in _optimizers(engine) if sharded or isinstance(inner.store, HostStore)]
    moments = [moment for inner in updated_there for moment in _state(inner)]
    counter = LiveBytes([*standing_tensors(engine), *data], host=[*moments, *rows])
    with counter, around(counter):
        engine.train_step(batches)
    return counter


def standing_tensors(engine: Any) -> list[Tensor]:
    """Return the tensors that persist between steps: parameters, gradients, optimizer state, main weights."""
    found: list[Tensor] = []
    for chunk in engine.model_chunks:
        found += [local_part(param) for param in chunk.parameters()]
        found += [param.main_grad for param in chunk.parameters() if getattr(param, "main_grad", None) is not None]
    for inner in _optimizers(engine):
        found += [local_part(param) for group in inner.param_groups for param in group["params"]]
        found += _state(inner)
    return found


def _optimizers(engine: Any) -> list[Any]:
    chained = getattr(engine.optimizer, "chained_optimizers", [engine.optimizer])
    return [each.optimizer for each in chained if each.optimizer is not None]


def _state(optimizer: Any) -> list[Tensor]:
    return [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
