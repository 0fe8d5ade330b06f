"""Define `RankHook`, the base class of code that runs around a training step, and call the callbacks of rank 0."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from megavlm.config.messages import described
from megavlm.data.types import StepData
from megavlm.errors import Stopped, UserError
from megavlm.metrics.callback import Callback, Samples, Saved, Start, State, StepEnd, StepHook, Stop, Validation, Value
from megavlm.resilience.phases import Phases
from megavlm.train.step_result import Counts, StepResult


@dataclass(frozen=True, kw_only=True)
class Step(StepEnd):
    """A step that ran or whose batch was left out. Hooks add fields to its record in `measure`."""

    record: dict[str, Value]
    data: StepData
    result: StepResult
    counts: Counts  # sums over all ranks
    seconds: float
    error: BaseException | None  # the next step's data cannot be read, or a save must end the run; equal on all ranks


class RankHook(StepHook[Step]):
    """A hook that every rank has, so that its methods may communicate.

    Per step, the order is `on_step_begin`, the step itself, which calls `judge`, then `measure`, `on_step_end` and
    `ends`. Each method is called on all hooks before the next method. `loop.hooks_of` lists the hooks.
    """

    def begin(self) -> None:
        """Run before the first step."""

    def judge(self, loss: float, norm: float | None) -> str | None:
        """Return why a step must not change the weights, equal on all ranks; None if it may. Called before the update,
        with the loss and the gradient norm, which is None where fp16 overflowed.
        """
        return None

    def measure(self, step: Step) -> Mapping[str, Value]:
        """Return the fields that this hook adds to the record of a step."""
        return {}

    def ends(self, step: Step) -> BaseException | None:
        """Return why the run must end after a step, equal on all ranks; None if not. The first hook's reason counts."""
        return None

    def finish(self, iteration: int, end: BaseException | None) -> BaseException | None:
        """Finish after the last step, in reverse order of the hooks; return why the run ends, by default as before."""
        return end

    def leave(self) -> None:
        """Release the hook's resources after training has ended, also after an error."""


@dataclass
class Callbacks(RankHook):
    """Calls all callbacks in order. A user's callback that raises gets no more calls; the first error is kept.

    No rank waits: `failure` and `stop` travel with the sums of the next step (`DataAhead`).
    """

    phases: Phases
    own: Sequence[Callback] = ()
    users: Sequence[tuple[str, Callback]] = ()  # with the name that the user gave
    names_users: bool = False  # whether the user named any; on all ranks
    failure: UserError | None = None
    stop: str | None = None  # why a callback asks the run to stop
    _iteration: int = field(default=0, init=False)
    _saved: list[Saved] = field(default_factory=list, init=False)  # complete, and not yet passed to callbacks
    _unwritable: list[Callback] = field(default_factory=list, init=False)  # own callbacks with a warning printed
    _broken: set[int] = field(default_factory=set, init=False)  # places of users' callbacks that raised

    def on_start(self, start: Start) -> None:
        self._iteration = start.iteration
        self._call("on_start", start)

    def on_step_begin(self, iteration: int) -> None:
        self._call("on_step_begin", iteration)

    def on_step_end(self, step: Step) -> None:
        """Pass the step to the callbacks, then the checkpoints that were completed during it."""
        self._iteration = step.iteration
        self._call("on_step_end", StepEnd(step.record, step.expert_loads))
        self._tell_saved()

    def on_validation(self, validation: Validation) -> None:
        self._call("on_validation", validation)

    def on_samples(self, samples: Samples) -> None:
        self._call("on_samples", samples)

    def on_save(self, saved: Saved) -> None:
        """Queue a complete checkpoint; callbacks get it after the step."""
        self._saved.append(saved)

    def _tell_saved(self) -> None:
        saved, self._saved = self._saved, []
        for each in saved:
            self._call("on_save", each)

    def on_stop(self, error: BaseException | None) -> None:
        """Call `on_stop` of all callbacks when the run ends; an error of a callback is only printed as a warning."""
        before = self.failure
        state: State = "finished" if error is None else "stopped" if isinstance(error, Stopped) else "failed"
        self._call("on_stop", Stop(self._iteration, state, None if error is None else str(error)))
        if self.failure is not before:
            print(f"warning: {self.failure}", file=sys.stderr, flush=True)

    def finish(self, iteration: int, end: BaseException | None) -> BaseException | None:
        """Pass on the last checkpoints; return, on all ranks, a callback's error if nothing else ends the run."""
        self._tell_saved()
        if end is not None or not self.names_users:
            return end
        shared = [None if self.failure is None else str(self.failure)]
        dist.broadcast_object_list(shared, src=0)
        return None if shared[0] is None else UserError(shared[0])

    def _call(self, method: str, event: Any) -> None:
        for callback in self.own:
            try:
                getattr(callback, method)(event)
            except OSError as error:  # a full disk, as a rule; metrics.jsonl waits for room by itself
                if callback not in self._unwritable:
                    self._unwritable.append(callback)
                    warning = f"{type(callback).__name__} cannot write ({error.strerror or error}): the run goes on"
                    print(f"warning: {warning}; metrics.jsonl has the same figures", file=sys.stderr, flush=True)
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
