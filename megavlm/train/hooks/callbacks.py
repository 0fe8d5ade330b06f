"""Call the callbacks of a run: its own sinks and trackers, then those that the user named. Rank 0 alone has any."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from megavlm.config.messages import described
from megavlm.errors import Stopped, UserError
from megavlm.metrics.callback import Callback, Samples, Saved, Start, State, StepEnd, Stop, Validation
from megavlm.resilience.phases import Phases
from megavlm.train.hooks.hook import RankHook, Step


@dataclass
class Callbacks(RankHook):
    """Calls them in order and keeps the first error of a user's callback, after which that one gets no more calls.

    No rank waits: `failure` and `stop` travel with the sums of the next step (`data_ahead.py`).
    """

    phases: Phases
    own: Sequence[Callback] = ()
    users: Sequence[tuple[str, Callback]] = ()  # with the name that the user gave
    names_users: bool = False  # whether the user named any; on all ranks
    failure: UserError | None = None
    stop: str | None = None  # why a callback asks the run to stop
    _iteration: int = field(default=0, init=False)
    _saved: list[Saved] = field(default_factory=list, init=False)  # complete, and not told yet
    _broken: set[int] = field(default_factory=set, init=False)  # places of users' callbacks that raised

    def on_start(self, start: Start) -> None:
        self._iteration = start.iteration
        self._call("on_start", start)

    def on_step_begin(self, iteration: int) -> None:
        self._call("on_step_begin", iteration)

    def on_step_end(self, step: Step) -> None:
        """Tell of a step, then of the checkpoints that have become complete in it."""
        self._iteration = step.iteration
        self._call("on_step_end", StepEnd(step.record, step.expert_loads))
        self._tell_saved()

    def on_validation(self, validation: Validation) -> None:
        self._call("on_validation", validation)

    def on_samples(self, samples: Samples) -> None:
        self._call("on_samples", samples)

    def on_save(self, saved: Saved) -> None:
        """Note a checkpoint that is complete, of which callbacks hear after the step."""
        self._saved.append(saved)

    def _tell_saved(self) -> None:
        saved, self._saved = self._saved, []
        for each in saved:
            self._call("on_save", each)

    def on_stop(self, error: BaseException | None) -> None:
        """Make the last call of a run that finished, or that an error ends; what a callback raises now is only said."""
        before = self.failure
        state: State = "finished" if error is None else "stopped" if isinstance(error, Stopped) else "failed"
        self._call("on_stop", Stop(self._iteration, state, None if error is None else str(error)))
        if self.failure is not before:
            print(f"warning: {self.failure}", file=sys.stderr, flush=True)

    def finish(self, iteration: int, end: BaseException | None) -> BaseException | None:
        """Tell of the last checkpoints; return, on all ranks, the error of a callback if nothing else ends the run."""
        self._tell_saved()
        if end is not None or not self.names_users:
            return end
        told = [None if self.failure is None else str(self.failure)]
        dist.broadcast_object_list(told, src=0)
        return None if told[0] is None else UserError(told[0])

    def _call(self, method: str, event: Any) -> None:
        for callback in self.own:
            getattr(callback, method)(event)
        phase = self.phases.now.phase
        for place, (name, callback) in enumerate(self.users):
            if place in self._broken:
                continue
            self.phases.enter(phase, f"{method} of --callback {name}")  # a hang is told with this name
            try:
                getattr(callback, method)(event)
            except Stopped as request:
                self.stop = self.stop or f"--callback {name}: {request}"
            except Exception as error:
                self._broken.add(place)
                self.failure = self.failure or UserError(f"--callback {name} fails in {method}: {described(error)}")
            self.phases.enter(phase)
