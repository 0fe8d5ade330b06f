"""Keep what a step changes besides weights and moments, so that a step whose update is refused leaves no trace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megavlm.parallel.groups import random_states, set_random_states
from megavlm.precision.fp8_state import histories, history_of


@dataclass(frozen=True)
class Histories:
    """Copies of the histories of delayed FP8 scaling; without it, of nothing."""

    chunks: Sequence[Any]
    kept: dict[str, Tensor]

    @classmethod
    def of(cls, chunks: Sequence[Any]) -> Histories:
        """Return copies of the present histories, made in one launch."""
        found = _histories(chunks)
        copies = [torch.empty_like(each) for each in found.values()]
        if copies:
            torch._foreach_copy_(copies, list(found.values()))
        return cls(chunks, dict(zip(found, copies, strict=True)))

    def restore(self) -> None:
        """Set the histories to the copies, and those that began since to what a history begins with."""
        for name, tensor in _histories(self.chunks).items():
            if name in self.kept:
                tensor.copy_(self.kept[name])
            else:
                tensor.fill_(1.0 if name.endswith(".scale") else 0.0)


def _histories(chunks: Sequence[Any]) -> dict[str, Tensor]:
    """Return the live tensors by name; only with delayed scaling are all modules searched."""
    scaled = [chunk for chunk in chunks if history_of(getattr(chunk, "module", chunk).run_config) is not None]
    return {name: tensor for chunk in scaled for name, tensor in histories(chunk).items()}


@dataclass(frozen=True)
class StateBeforeStep:
    """Random generators, FP8 histories, and fp16's loss scale with its counters; no copy waits for the device."""

    random: dict[str, Any]
    histories: Histories
    scalers: list[tuple[Any, dict[str, Any]]]

    @classmethod
    def of(cls, chunks: Sequence[Any], optimizer: Any) -> StateBeforeStep:
        """Return a copy of the present state."""
        found = [getattr(part, "grad_scaler", None) for part in optimizer.chained_optimizers]
        scalers = [(scaler, scaler.state_dict()) for scaler in found if scaler is not None]
        return cls(random_states(), Histories.of(chunks), scalers)

    def restore(self) -> None:
        """Set the random generators, the histories and the loss scale to the kept state."""
        set_random_states(self.random)
        self.histories.restore()
        for scaler, state in self.scalers:
            scaler.load_state_dict(state)
