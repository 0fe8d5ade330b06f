"""Say that a step and a save take longer than torchrun waits before it kills."""

from __future__ import annotations

from collections.abc import Callable

from megavlm.resilience.signals import patience_complaint, torchrun_patience, under_torchrun


class Patience:
    """Compares the seconds of steps and saves with torchrun's patience, and says once that it is too short."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._steps: list[float] = []
        self._save = 0.0
        self._silent = not under_torchrun()
        self._patience = torchrun_patience()

    def step(self, seconds: float) -> None:
        """Note the time of a step."""
        self._steps = [*self._steps[-2:], seconds]
        self._look()

    def save(self, seconds: float) -> None:
        """Note the time of a save."""
        self._save = seconds
        self._look()

    def _look(self) -> None:
        if self._silent or len(self._steps) < 3:
            return
        if line := patience_complaint(step=min(self._steps), save=self._save, patience=self._patience):
            self._silent = True
            self._say(line)
