"""Keep what a step changes besides weights and moments, so that a step whose update is refused leaves no trace."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megavlm.checkpoint.state import random_states, set_random_states


@dataclass(frozen=True)
class StateBeforeStep:
    """Random generators, and fp16's loss scale with its counters: a few kilobytes; no copy waits for the device."""

    random: dict[str, Any]
    scalers: list[tuple[Any, dict[str, Any]]]

    @classmethod
    def of(cls, optimizer: Any) -> StateBeforeStep:
        """Return a copy of the present state."""
        found = [getattr(part, "grad_scaler", None) for part in optimizer.chained_optimizers]
        return cls(random_states(), [(scaler, scaler.state_dict()) for scaler in found if scaler is not None])

    def restore(self) -> None:
        """Set the random generators and the loss scale to the kept state."""
        set_random_states(self.random)
        for scaler, state in self.scalers:
            scaler.load_state_dict(state)
