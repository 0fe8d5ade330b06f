"""Find how each rank spends its steps, and which one slows the others down. Pure functions, without torch."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from megavlm.resilience.phases import COMPUTE, DATA, OPTIMIZER, OTHER
from megavlm.resilience.progress import Report

# A rank's own time in a step; in the other phases it waits for others, or all ranks do the same.
OWN = (DATA, COMPUTE, OPTIMIZER, OTHER)
NOTABLE = 0.1  # a rank that is slower than the median by this fraction is reported
_REPEATS = 3  # reports in a row that must agree on a slow rank and its phase before it is an event
_PAUSE = 600.0  # seconds between two events


@dataclass(frozen=True)
class Spread:
    """How ranks spent the steps between two tables of reports, in seconds per step."""

    steps: int  # of the slowest rank
    seconds: Mapping[str, float]  # median over ranks, by phase
    slowest: int  # the rank with the most time of its own
    host: str
    own: float  # its own time
    excess: float  # by which fraction that is above the median of all ranks
    phase: str  # where it spends more than the median rank

    @property
    def notable(self) -> bool:
        return self.excess > NOTABLE

    @property
    def longer(self) -> float:
        """Return how many seconds per step the slowest rank takes more than the median rank."""
        return self.own - self.own / (1 + self.excess)

    @property
    def words(self) -> str:
        """Return what the progress line says of the slowest rank."""
        who = f"rank {self.slowest} ({self.host})"
        return f"{who} takes {self.longer:.2f} s per step more than the median, in {self.phase}"


class SlowEvents:
    """Decides which reports of a slow rank become events: one event per report would fill events.jsonl."""

    def __init__(self) -> None:
        self._named: tuple[int, str] | None = None  # by the last report
        self._repeats = 0
        self._last = -math.inf

    def wants(self, found: Spread, now: float) -> bool:
        """Return whether a report at `now` (seconds of any clock) is to be an event; call it with each report."""
        named = (found.slowest, found.phase) if found.notable else None
        self._repeats = self._repeats + 1 if named == self._named else 1
        self._named = named
        if named is None or self._repeats < _REPEATS or now - self._last < _PAUSE:
            return False
        self._last = now
        return True


def spread(before: Mapping[int, Report], after: Mapping[int, Report]) -> Spread | None:
    """Return how ranks spent their time between two tables; None where a rank has done no step in between.

    Ranks that share a layer (tensor parallelism) wait for one another inside it, and all count as busy meanwhile: of
    these the first is named.
    """
    per_step: dict[int, dict[str, float]] = {}
    for rank, late in after.items():
        early = before.get(rank)
        if early is None or early.steps == 0 or late.steps <= early.steps or late.process != early.process:
            return None
        steps = late.steps - early.steps
        per_step[rank] = {name: (value - early.seconds.get(name, 0.0)) / steps for name, value in late.seconds.items()}
    if not per_step:
        return None
    names = sorted({name for seconds in per_step.values() for name in seconds})
    median = {name: statistics.median(seconds.get(name, 0.0) for seconds in per_step.values()) for name in names}
    own = {rank: sum(value for name, value in seconds.items() if name in OWN) for rank, seconds in per_step.items()}
    slowest = max(own, key=lambda rank: (own[rank], -rank))
    middle = statistics.median_low(own.values())
    extra = {name: per_step[slowest].get(name, 0.0) - median[name] for name in names if name in OWN}
    return Spread(
        steps=after[slowest].steps - before[slowest].steps,
        seconds=median,
        slowest=slowest,
        host=after[slowest].host,
        own=own[slowest],
        excess=own[slowest] / middle - 1 if middle > 0 else 0.0,
        phase=max(extra, key=lambda name: extra[name], default=DATA),
    )
