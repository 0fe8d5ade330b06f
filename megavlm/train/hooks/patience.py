"""Say that the end of a step and a save take longer than torchrun or a scheduler waits before it kills."""

from __future__ import annotations

from megavlm.resilience.signals import may_be_killed, patience_complaint, torchrun_patience
from megavlm.train.hooks.hook import RankHook, Step
from megavlm.train.run import Run

_MEASURED = 2  # steps: the first takes longer, since kernels are compiled and chosen


class Patience(RankHook):
    """Compares the seconds of steps and saves with the patience of torchrun, and says once that it is too short."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._steps: list[float] = []
        self._save = 0.0
        self._silent = not may_be_killed()
        self._patience = torchrun_patience()

    def on_step_end(self, step: Step) -> None:
        """Note the time of a step."""
        self._steps = [*self._steps[-2:], step.seconds]
        self._look()

    def save(self, seconds: float) -> None:
        """Note the time of a save."""
        self._save = seconds
        self._look()

    def _look(self) -> None:
        if self._silent or len(self._steps) < _MEASURED:
            return
        step = min(self._steps)
        if line := patience_complaint(step=step, save=self._save, patience=self._patience):
            self._silent = True
            self._run.say(line)
