"""List the hooks around a training step, in the order of their calls."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megavlm.resilience.signals import StopRequest
from megavlm.train.hooks.device_checks import DeviceChecks
from megavlm.train.hooks.held_out import SamplesHook, ValidationHook
from megavlm.train.hooks.hook import RankHook
from megavlm.train.hooks.saves import Saves
from megavlm.train.hooks.step_guard import StepGuard
from megavlm.train.hooks.stops import DataAhead, SkippedSamples, Stops, Tally
from megavlm.train.hooks.trace import Trace
from megavlm.train.run import Run


@dataclass(frozen=True)
class Hooks:
    """All hooks of a run in order, with the two that the training loop uses by name."""

    ordered: tuple[RankHook, ...]
    guard: StepGuard
    ahead: DataAhead

    def __iter__(self) -> Iterator[RankHook]:
        return iter(self.ordered)

    def judge(self, loss: float, norm: float | None) -> str | None:
        """Return the first hook's reason why a step must not change the weights; None if it may."""
        return next(filter(None, (hook.judge(loss, norm) for hook in self)), None)

    def leave(self) -> None:
        """Release the resources of all hooks."""
        for hook in self:
            hook.leave()


def hooks_of(run: Run, stop: StopRequest) -> Hooks:
    """Return the hooks of a run. Each method is called in this order, `finish` in the reverse."""
    stops, guard = Stops(run, stop), StepGuard(run)
    tally = Tally(run.position.samples_read, run.position.samples_skipped)
    saves = Saves(run, tally, guard, stops)
    ahead = DataAhead(run, stop, bad_save=saves.bad)
    ordered = (
        Trace(run),  # first: neither checks nor validation are in it
        run.watch,
        DeviceChecks(run, guard.report),  # its fault comes before the guard's reason to skip a step
        ahead,
        SkippedSamples(run, tally, keeps=saves.keeps),  # tallied before a save notes the position
        ValidationHook(run, stops),
        SamplesHook(run, stops),
        run.callbacks,  # the record is complete; a bad step is shown before what follows from it
        guard,
        saves,
        stops,  # last: an error says more than a request to stop
    )
    return Hooks(ordered, guard, ahead)
