"""`RankHook`: what training does around a step. Validation, saves, checks, … are hooks; `order.py` lists them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megavlm.data.types import StepData
from megavlm.metrics.callback import StepEnd, StepHook, Value
from megavlm.train.counts import Counts
from megavlm.train.step_result import StepResult


@dataclass(frozen=True, kw_only=True)
class Step(StepEnd):
    """A step that is done, or whose batch was left out. Hooks add to its record until all have measured it."""

    record: dict[str, Value]
    data: StepData
    result: StepResult
    counts: Counts  # sums over all ranks
    seconds: float
    error: BaseException | None  # the next step's data cannot be read, or a save must end the run; equal on all ranks


class RankHook(StepHook[Step]):
    """A hook that every rank has, so that its methods may communicate.

    For each step come `on_step_begin`, the step, in which `judge` is asked, then `measure`, `on_step_end` and `ends`,
    each of all hooks before the next.
    """

    def begin(self) -> None:
        """Act before the first step."""

    def judge(self, loss: float, norm: float | None) -> str | None:
        """Return why a step must not change the weights, alike on all ranks; None if it may. It is asked before the
        update, with the gradient norm, or None where fp16 overflowed.
        """
        return None

    def measure(self, step: Step) -> Mapping[str, Value]:
        """Return what the record of a step is to have of this hook."""
        return {}

    def ends(self, step: Step) -> BaseException | None:
        """Return why the run ends after a step, equal on all ranks; the first hook that has a reason is heard."""
        return None

    def finish(self, iteration: int, end: BaseException | None) -> BaseException | None:
        """Finish after the last step, in reverse order of the hooks; return why the run ends, by default as before."""
        return end

    def leave(self) -> None:
        """Release what the hook holds after training has ended, also by an error."""
