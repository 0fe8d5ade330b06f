"""Compute how long a run took to recover from each end of an attempt. Pure functions, without torch."""

from __future__ import annotations

import statistics
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from megavlm.resilience.history import ASKED, Attempt, History, Step

KILLED = "killed"


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
