"""Find the rank that all others wait for, from the progress reports of all ranks. Pure functions, without torch."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from typing import Any

from megavlm.resilience import phases
from megavlm.resilience.phases import COMPUTE, DATA, OPTIMIZER, OTHER

# Seconds without progress that are no hang in phases that may take long, whatever --hang-timeout says.
# A save copies; while it waits for the writer of the one before, it makes progress.
PATIENCE = dict.fromkeys((phases.VALIDATION, phases.TRACE), 1800.0)
PATIENCE |= {phases.START: 86400.0, phases.SAVE: 300.0, phases.END: 600.0}
DOOMED = 0.9  # fraction of --distributed-timeout-minutes: soon torch will end a rank that waits, and name nobody
FIRST_STEP = 1800.0  # kernels are compiled and chosen, and buffers are made
LEAST = 60.0  # seconds: the default of --hang-timeout is never below
STEPS = 10  # the default of --hang-timeout in median steps


@dataclass(frozen=True)
class Report:
    """A rank's report of its progress, stored as JSON in the store."""

    rank: int
    host: str
    process: int
    beat: int  # grows with each report
    iteration: int
    phase: str
    detail: str
    idle: float  # seconds without progress
    place: str  # where the training thread is, once it has been idle for a while; else empty
    waits: bool  # that place waits for other ranks
    steps: int = 0  # done by this process
    seconds: Mapping[str, float] = field(default_factory=dict)  # by phase, since this process started
    waited: float = 0.0  # seconds of the wait that it is in
    silent: float = 0.0  # seconds for which the reader has seen no new report
    peak_memory: int = 0  # bytes
    energy: float | None = None  # joules of a step of the rank's GPU; None where nothing tells it

    def dumps(self) -> str:
        return json.dumps(astuple(self))

    @classmethod
    def loads(cls, text: str | bytes) -> Report:
        return cls(*json.loads(text))

    def after(self, before: Report | None, passed: float) -> Report:
        """Return this report, read `passed` seconds after `before`; if it is unchanged, with a longer `silent`."""
        if before is None or self.beat != before.beat:
            return self
        return replace(self, silent=before.silent + passed)


@dataclass(frozen=True)
class Limits:
    """Seconds after which a run hangs."""

    hang: float | None = None  # --hang-timeout: without progress in a step; 0: never; None: ten median steps
    data: float = 0.0  # in which the data loader itself names and replaces workers that hang
    collective: float = math.inf  # --distributed-timeout-minutes

    def timeout(self, step_seconds: Sequence[float]) -> float:
        """Return the seconds without progress that are a hang: as given, else ten median steps, at least 60 s."""
        if self.hang is not None:
            return self.hang
        return max(LEAST, STEPS * statistics.median(step_seconds)) if step_seconds else LEAST


def patience(report: Report, timeout: float, limits: Limits) -> float:
    """Return the seconds without progress that are allowed in this rank's phase."""
    longest = PATIENCE.get(report.phase, timeout)
    if report.phase == phases.DATA and not report.waits:
        longest = limits.data
    return max(timeout, longest, 0.0 if report.steps else FIRST_STEP)


def culprit(table: Sequence[Report], *, timeout: float, limits: Limits, interval: float) -> Report | None:
    """Return the report of the rank that stopped first if the run hangs; None while it does not.

    A run hangs when one rank has made no progress for longer than the phase of any rank allows, has waited for others
    for nearly as long as torch allows, or has sent no report for longer than a step may take. The others then wait for
    one rank, which is, in this order:

    1. a rank whose reports have stopped, while others report: its process is stopped or cut off;
    2. a rank that is not waiting for other ranks;
    3. the rank with the fewest iterations done, then the one that has been idle for longest.
    """
    if not table:
        return None
    idle = max(report.idle + report.silent for report in table)
    doomed = max(report.waited for report in table) > DOOMED * limits.collective
    stopped = any(report.silent > timeout and report.steps and report.phase != phases.END for report in table)
    # Ranks are at most one iteration apart: an older report says no longer where its rank is. The last one of a process
    # that was stopped may be from the start, which may take long.
    latest = max(report.iteration for report in table)
    longest = max(patience(report, timeout, limits) for report in table if report.iteration >= latest - 1)
    if not doomed and not stopped and idle <= longest:
        return None
    return min(
        table,
        key=lambda report: (
            not is_silent(report, interval),
            report.waits,
            report.iteration,
            -(report.idle + report.silent),
            report.rank,
        ),
    )


def is_silent(report: Report, interval: float) -> bool:
    """Return whether a rank that reports every `interval` seconds has missed several reports."""
    return report.silent > 4 * interval


def sentence(report: Report, table: Sequence[Report], *, interval: float) -> str:
    """Return a line that names the rank that stopped, its place in the code, and how many other ranks wait."""
    seconds = report.idle + report.silent
    where = f"iteration {report.iteration}, {report.phase}" + (f" ({report.detail})" if report.detail else "")
    who = f"rank {report.rank} ({report.host}, process {report.process})"
    line = f"{who} has made no progress for {seconds:.0f} s in {where}"
    if is_silent(report, interval):
        line += "; its process does not answer: it is stopped, or its host cannot be reached"
    elif report.place:
        line += f", at {report.place}"
    others = [each for each in table if each.rank != report.rank]
    waiting = sum(each.waits for each in others)
    if others:
        line += f"; of the others, {waiting} of {len(others)} wait in a collective"
    return line


# A rank's own time in a step; in the other phases it waits for others, or all ranks do the same.
OWN = (DATA, COMPUTE, OPTIMIZER, OTHER)
NOTABLE = 0.1  # a rank that is slower than the median by this fraction is reported
_REPEATS = 3  # reports in a row that must agree on a slow rank and its phase before it is an event
_PAUSE = 600.0  # seconds between two events


class SlowEvents:
    """Selects the reports of a slow rank that are written as events; one event per report would fill events.jsonl."""

    def __init__(self) -> None:
        self._named: tuple[Any, Any] | None = None  # by the last report
        self._repeats = 0
        self._last = -math.inf

    def wants(self, found: Mapping[str, Any], now: float) -> bool:
        """Return whether a report at `now` (seconds of any clock) is to be an event; call it with each report."""
        named = (found["slowest_rank"], found["slowest_rank_phase"]) if "slow" in found else None
        self._repeats = self._repeats + 1 if named == self._named else 1
        self._named = named
        if named is None or self._repeats < _REPEATS or now - self._last < _PAUSE:
            return False
        self._last = now
        return True


def memory_by_stage(table: Mapping[int, Report], stages: int) -> dict[str, float]:
    """Return the peak memory of the fullest rank of each pipeline stage in GiB; stages are runs of ranks."""
    found: dict[str, float] = {}
    for rank, report in table.items():
        stage = str(rank * stages // len(table))
        found[stage] = max(found.get(stage, 0.0), report.peak_memory / 2**30)
    return found


def spread(before: Mapping[int, Report], after: Mapping[int, Report]) -> dict[str, Any] | None:
    """Return the fields of a step's record on the time of ranks between two tables, in seconds per step: medians over
    ranks by phase, the rank with the most time of its own, the fraction by which it exceeds the median, and the phase
    with the largest excess; also a line if the excess is notable. None if a rank has done no step in between.

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
    excess = own[slowest] / middle - 1 if middle > 0 else 0.0
    phase = max(extra, key=lambda name: extra[name], default=DATA)
    found = {
        "phase_seconds": median,
        "slowest_rank": slowest,
        "slowest_rank_s": own[slowest],
        "slowest_rank_excess": excess,
        "slowest_rank_phase": phase,
    }
    if excess > NOTABLE:
        who = f"rank {slowest} ({after[slowest].host})"
        longer = own[slowest] - own[slowest] / (1 + excess)
        found["slow"] = f"{who} takes {longer:.2f} s per step more than the median, in {phase}"
    return found
