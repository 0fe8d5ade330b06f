"""Account for a run's time: recoveries from each end of an attempt, and how throughput grows with devices."""

from __future__ import annotations

import statistics
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from megavlm.programs.history import ASKED, Attempt, History, Step
from megavlm.resilience.events import json_lines

_WARM_UP = 2  # first steps of a run, which are slower
KILLED = "killed"


def records_of(run_dir: Path) -> list[dict[str, Any]]:
    """Return the records of metrics.jsonl; lines that cannot be read are left out."""
    return json_lines(run_dir / "metrics.jsonl")


@dataclass(frozen=True)
class Recovery:
    """The end of an attempt, and how the run came back. Seconds; None: it has not so far."""

    at: float  # from the beginning of the run to the last step before, or to the end that was asked for
    attempt: int  # the one that ended, counted from 0
    kind: str  # the event of its end, or KILLED
    reason: str
    lost_steps: int
    to_step: float | None  # from then to the first step that counts
    to_catch_up: float | None  # from then until the iteration that had been reached was done again


def recoveries_of(history: History) -> list[Recovery]:
    """Return a recovery for each attempt but the first."""
    steps = [step for attempt in history.attempts for step in attempt.steps]
    found, done = [], 0
    for number, (ended, later) in enumerate(zip(history.attempts, history.attempts[1:], strict=False)):
        done += len(ended.steps)
        found.append(_recovery(history.begin, number, ended, later, steps, done))
    return found


def typical(seconds: Sequence[float | None]) -> float | None:
    """Return the median of the seconds that are known; None without any."""
    known = [each for each in seconds if each is not None]
    return statistics.median(known) if known else None


def _recovery(begin: int, number: int, ended: Attempt, later: Attempt, steps: Sequence[Step], done: int) -> Recovery:
    """Return how the run came back after an attempt; the attempts up to it did the first `done` of the `steps`."""
    time, event = ended.end or (ended.alive, {})
    kind = str(event.get("kind", KILLED))
    at = time if kind in ASKED else ended.alive
    lost, resumed = later.start.get("lost_steps"), later.start.get("iteration")
    lost_steps = lost if isinstance(lost, int) else 0
    reached = lost_steps + (resumed if isinstance(resumed, int) else 0)
    again = max(done, bisect_left(steps, reached, key=lambda step: step.iteration))

    def seconds_to(place: int) -> float | None:
        return (steps[place].end - at) / 1e6 if place < len(steps) else None

    return Recovery(
        at=(at - begin) / 1e6,
        attempt=number,
        kind=kind,
        reason=str(event.get("reason", "")),
        lost_steps=lost_steps,
        to_step=seconds_to(done),
        to_catch_up=seconds_to(again),
    )


@dataclass(frozen=True)
class Account:
    """What the time of a run went to, and what it took to recover."""

    name: str
    history: History

    @cached_property
    def recoveries(self) -> list[Recovery]:
        return recoveries_of(self.history)

    @property
    def typical_recovery(self) -> float | None:
        """Return the median seconds from the end of an attempt to the next step that counts."""
        return typical([each.to_step for each in self.recoveries if each.kind != "finish"])

    @property
    def iterations(self) -> int:
        """Return the number of steps that stay in metrics.jsonl."""
        return sum(len(attempt.steps) for attempt in self.history.attempts)

    @property
    def devices(self) -> int:
        """Return the number of ranks of the last attempt; 0 if it does not say."""
        return devices_of([attempt.start for attempt in self.history.attempts])

    def as_json(self) -> dict[str, Any]:
        past = self.history
        return {
            "run": self.name,
            "wall_s": past.wall,
            "goodput": past.goodput,
            "kept": past.kept,
            "seconds": past.seconds,
            "iterations": self.iterations,
            "devices": self.devices,
            "restarts": past.restarts,
            "typical_recovery_s": self.typical_recovery,
            "recoveries": [vars(each) for each in self.recoveries],
        }


@dataclass(frozen=True)
class Point:
    """The throughput of a run."""

    name: str
    devices: int
    tokens_per_second: float  # median over its steps

    @property
    def per_device(self) -> float:
        return self.tokens_per_second / self.devices


@dataclass(frozen=True)
class Scaling:
    """Runs of several sizes, the smallest first."""

    points: Sequence[Point]

    @property
    def shares(self) -> list[float]:
        """Return the throughput per device of each run against that of the smallest."""
        return [point.per_device / self.points[0].per_device for point in self.points]


def scaling_of(points: Sequence[Point]) -> Scaling:
    return Scaling(sorted(points, key=lambda point: (point.devices, point.name)))


def point_of(name: str, events: Sequence[Mapping[str, Any]], records: Sequence[Mapping[str, Any]]) -> Point | None:
    """Return the throughput of a run; None if it does not tell its devices, or has no step that counts."""
    devices = devices_of([event for event in events if event.get("kind") == "start"])
    rates = [record.get("tokens_per_second") for record in records[_WARM_UP:] if record.get("updated") is not False]
    known = [float(rate) for rate in rates if isinstance(rate, int | float) and 0 < rate < 1e15]
    return Point(name, devices, statistics.median(known)) if devices and known else None


def devices_of(starts: Sequence[Mapping[str, Any]]) -> int:
    """Return the number of ranks that the last start tells; 0 if none does."""
    worlds = [world for start in starts if isinstance(world := start.get("world"), int) and world > 0]
    return worlds[-1] if worlds else 0
