"""Note what this rank is doing and how its time divides into phases; it costs a few assignments per micro-batch.

The training thread writes; the watchdog's thread reads (`watchdog.py`). Reading needs no lock, because each change is
one assignment.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

START = "start"
DATA = "data"
COMPUTE = "compute"
PIPELINE = "pipeline wait"
COMMUNICATION = "communication"
OPTIMIZER = "optimizer"
OTHER = "other"
VALIDATION = "validation"
SAVE = "save"
END = "end"


class Now(NamedTuple):
    """What the training thread does. `changes` grows with every change: an unchanged number means no progress."""

    iteration: int
    phase: str
    detail: str  # for example "forward of chunk 0, micro-batch 3"
    changes: int


class Totals(NamedTuple):
    """What this process has done since it started."""

    steps: int
    seconds: Mapping[str, float]  # by phase, of whole steps and of what lies between them


class Clock(Protocol):
    """Takes the time of a moment in a step. A device's clock tells when the device gets there."""

    def moment(self) -> Any:
        """Return a mark of this moment."""

    def has_passed(self, moment: Any) -> bool:
        """Return whether the device has got to a moment; it does not wait for it."""

    def seconds(self, earlier: Any, later: Any) -> float:
        """Return the seconds between two moments that have passed."""


class HostClock:
    """The clock of the host; right for a CPU, whose work is done when the call returns."""

    def moment(self) -> float:
        return time.perf_counter()

    def has_passed(self, moment: float) -> bool:
        return True

    def seconds(self, earlier: float, later: float) -> float:
        return later - earlier


class Phases:
    """The phases of this rank's training thread; each lasts until the next is entered.

    Inside a step `clock` measures them. A device may still update weights when the host has ended the step: its seconds
    are then read at the end of the next step. Between steps (evaluation, save) the host's clock measures.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self.now = Now(0, START, "", 0)
        self.totals = Totals(0, {})
        self._clock: Clock = clock if clock is not None else HostClock()
        self._moments: list[tuple[str, Any]] = []  # of the step; empty between steps
        self._unread: deque[list[tuple[str, Any]]] = deque()  # of steps that the device had not ended when last asked
        self._since = time.perf_counter()  # beginning of a phase between steps

    def enter(self, phase: str, detail: str = "") -> None:
        """Begin a phase; `detail` says which part of it."""
        before = self.now
        self.now = Now(before.iteration, phase, detail, before.changes + 1)
        if phase == before.phase:
            return
        if self._moments:
            self._moments.append((phase, self._clock.moment()))
        else:
            self._add({before.phase: self._lap()})

    def begin_step(self, iteration: int) -> None:
        """Begin a step with its data."""
        self.enter(DATA)
        self.now = self.now._replace(iteration=iteration)
        self._moments = [(DATA, self._clock.moment())]

    def end_step(self) -> None:
        """End a step; what follows is between steps."""
        self._unread.append(self._moments)
        self._moments = []
        self._lap()
        while self._unread and self._clock.has_passed(self._unread[0][-1][1]):
            self._read(self._unread.popleft())
        self.enter(OTHER)

    def _read(self, moments: Sequence[tuple[str, Any]]) -> None:
        """Add the seconds of a step that the device has ended."""
        seconds: dict[str, float] = {}
        for (phase, began), (_, ended) in pairwise(moments):
            seconds[phase] = seconds.get(phase, 0.0) + self._clock.seconds(began, ended)
        self._add(seconds, steps=1)

    def _lap(self) -> float:
        before, self._since = self._since, time.perf_counter()
        return self._since - before

    def _add(self, seconds: Mapping[str, float], *, steps: int = 0) -> None:
        total = dict(self.totals.seconds)
        for phase, value in seconds.items():
            total[phase] = total.get(phase, 0.0) + value
        self.totals = Totals(self.totals.steps + steps, total)
