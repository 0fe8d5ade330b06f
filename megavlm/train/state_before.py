"""What a step changes besides weights and moments, kept so that a step whose update is refused leaves no trace."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megavlm.checkpoint.state import random_states, set_random_states


@dataclass(frozen=True)
class StateBeforeStep:
    """Random generators, and fp16's loss scale with its counters. A few kilobytes on the host, without a wait."""

    random: dict[str, Any]
    scalers: list[tuple[Any, dict[str, Any]]]

    @classmethod
    def of(cls, optimizer: Any) -> StateBeforeStep:
        """Return the present state."""
        found = [getattr(part, "grad_scaler", None) for part in optimizer.chained_optimizers]
        return cls(random_states(), [(scaler, scaler.state_dict()) for scaler in found if scaler is not None])

    def restore(self) -> None:
        """Set what was kept."""
        set_random_states(self.random)
        for scaler, state in self.scalers:
            scaler.load_state_dict(state)
