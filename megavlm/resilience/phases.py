"""Record the current phase of this rank and the time per phase, at a few assignments per micro-batch.

The parts of a start are phases of their own: RUN_DIR/starting.json has the current part of rank 0, and the event
`started` the seconds of each part.

The training thread writes; the watchdog's thread reads (`watchdog.py`). Reading needs no lock, because each change is
one assignment.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from megavlm.files import replace_file
from megavlm.json_files import read_own
from megavlm.resilience.events import attempt, record

START = "start"
DATA = "data"
COMPUTE = "compute"
PIPELINE = "pipeline wait"
COMMUNICATION = "communication"
OPTIMIZER = "optimizer"
OTHER = "other"
VALIDATION = "validation"
SAVE = "save"
TRACE = "trace"  # what a profiler has seen is written
END = "end"


class Now(NamedTuple):
    """Current activity of the training thread. `changes` grows with each change: an equal number means no progress."""

    iteration: int
    phase: str
    detail: str  # for example "forward of chunk 0, micro-batch 3"
    changes: int


class Totals(NamedTuple):
    """Steps and seconds per phase since this process started."""

    steps: int
    seconds: Mapping[str, float]  # by phase, of whole steps and of what lies between them


class Clock:
    """Clock that marks moments in a step. This one is the host's clock, which suits a CPU: its work is synchronous.

    The clock of another device measures when the device reaches the moment.
    """

    def moment(self) -> Any:
        """Return a mark of this moment."""
        return time.perf_counter()

    def has_passed(self, moment: Any) -> bool:
        """Return whether the device has reached a moment, without waiting."""
        return True

    def seconds(self, earlier: Any, later: Any) -> float:
        """Return the seconds between two moments that have passed."""
        return float(later - earlier)


class Phases:
    """The phases of this rank's training thread; each lasts until the next is entered.

    Inside a step `clock` measures them. A device may still update weights when the host has ended the step: its seconds
    are then read at the end of the next step. Between steps (evaluation, save) the host's clock measures.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self.now = Now(0, START, "", 0)
        self.totals = Totals(0, {})
        self._clock = clock or Clock()
        self._moments: list[tuple[str, Any]] = []  # of the step; empty between steps
        self._unread: deque[list[tuple[str, Any]]] = deque()  # of steps that the device had not ended when last asked
        self._since = time.perf_counter()  # beginning of a phase between steps

    def enter(self, phase: str, detail: str = "") -> None:
        """Enter a phase; `detail` names the part of it."""
        before = self.now
        self.now = Now(before.iteration, phase, detail, before.changes + 1)
        if phase == before.phase:
            return
        if self._moments:
            self._moments.append((phase, self._clock.moment()))
        else:
            self._add({before.phase: self._lap()})

    def begin_step(self, iteration: int) -> None:
        """Begin a step, in the phase `DATA`."""
        self.enter(DATA)
        self.now = self.now._replace(iteration=iteration)
        self._moments = [(DATA, self._clock.moment())]

    def end_step(self) -> None:
        """End a step; time until the next `begin_step` counts as between steps."""
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


STARTING = "starting.json"

# The parts of a start, in their order, with what rank 0 does.
PARTS = {
    "imports": "importing modules",
    "rendezvous": "meeting the other ranks",
    "callbacks": "loading callbacks",
    "tokenizer": "reading the tokenizer",
    "groups": "making process groups",
    "data": "preparing data",
    "download": "fetching a checkpoint from a store",
    "model": "building the model",
    "weights": "reading weights",
    "outputs": "opening its outputs",
    "first_batch": "waiting for the first batch",
    "first_step": "taking the first step",
}


class StartTimes:
    """The seconds of each part of this process's start; rank 0 writes them to the run folder once it is locked."""

    def __init__(self, began: float, clock: Callable[[], float] = time.time) -> None:
        """`began` is when the process began, in seconds since 1970, as `clock` returns them."""
        self.run_dir: Path | None = None  # of rank 0, once it has locked it
        self._clock = clock
        self._began = self._since = began
        self._part: str | None = "imports"  # None: the start is over
        self._seconds: dict[str, float] = {}

    def enter(self, part: str) -> None:
        """End the current part and begin `part`. After the first step, do nothing."""
        assert part in PARTS, f"list the part {part!r} in PARTS"
        if self._part is None:
            return
        self._add(self._part, self._lap())
        self._part = part
        if self.run_dir is None:
            return
        now = {"attempt": attempt(), "began": self._began, "part": part, "since": self._since, "phases": self._seconds}
        with suppress(OSError):  # the run itself will say that its folder cannot be written
            replace_file(self.run_dir / STARTING, json.dumps(now) + "\n")

    def first_step_done(self, iteration: int, *, waited: float) -> None:
        """Write the event `started` after the first step, once; `waited`: seconds that it waited for its batch."""
        if self._part is None:
            return
        spent = self._lap()
        self._add("first_batch", min(waited, spent))
        self._add("first_step", max(0.0, spent - waited))
        self._part = None
        if self.run_dir is not None:
            seconds = round(self._since - self._began, 3)
            record(self.run_dir, "started", iteration=iteration, seconds=seconds, phases=self._seconds)
            with suppress(OSError):
                (self.run_dir / STARTING).unlink()

    def _lap(self) -> float:
        before, self._since = self._since, self._clock()
        return max(0.0, self._since - before)

    def _add(self, part: str, seconds: float) -> None:
        self._seconds[part] = round(self._seconds.get(part, 0.0) + seconds, 3)


def unfinished(run_dir: Path) -> dict[str, Any]:
    """Return RUN_DIR/starting.json of a start whose first step is not done; {} if there is none."""
    start = read_own(run_dir / STARTING)
    return start if start.get("part") in [*PARTS] else {}
