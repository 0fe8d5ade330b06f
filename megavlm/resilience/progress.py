"""Find the rank for which all others wait, in a table of what each rank reports. Pure functions, without torch."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace

from megavlm.resilience import phases

# Seconds without progress that are no hang in phases that may take long, whatever --hang-timeout says.
# A save copies; while it waits for the writer of the one before, it makes progress.
PATIENCE = {phases.START: 3600.0, phases.VALIDATION: 1800.0, phases.SAVE: 300.0, phases.END: 600.0}
DOOMED = 0.9  # fraction of --distributed-timeout-minutes: soon torch will end a rank that waits, and name nobody
FIRST_STEP = 1800.0  # kernels are compiled and chosen, and buffers are made
LEAST = 60.0  # seconds: the default of --hang-timeout is never below
STEPS = 10  # the default of --hang-timeout in median steps


@dataclass(frozen=True)
class Report:
    """What a rank publishes of itself; JSON in the store."""

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

    def dumps(self) -> str:
        return json.dumps(astuple(self))

    @classmethod
    def loads(cls, text: str | bytes) -> Report:
        return cls(*json.loads(text))


@dataclass(frozen=True)
class Limits:
    """Seconds after which a run hangs."""

    hang: float | None = None  # --hang-timeout: without progress in a step; 0: never; None: ten median steps
    data: float = 0.0  # in which the data name and replace what hangs by themselves
    collective: float = math.inf  # --distributed-timeout-minutes

    def timeout(self, step_seconds: Sequence[float]) -> float:
        """Return the seconds without progress that are a hang: as given, else ten median steps, at least 60 s."""
        if self.hang is not None:
            return self.hang
        return max(LEAST, STEPS * statistics.median(step_seconds)) if step_seconds else LEAST


def patience(report: Report, timeout: float, limits: Limits) -> float:
    """Return the seconds without progress that are no hang where this rank is."""
    longest = PATIENCE.get(report.phase, timeout)
    if report.phase == phases.DATA and not report.waits:
        longest = limits.data
    return max(timeout, longest, 0.0 if report.steps else FIRST_STEP)


def _up_to_date(table: Sequence[Report]) -> list[Report]:
    """Return the reports that say where their ranks are: ranks are at most one iteration apart.

    The last report of a process that was stopped may be from the start, which may take long.
    """
    latest = max(report.iteration for report in table)
    return [report for report in table if report.iteration >= latest - 1]


def culprit(table: Sequence[Report], *, timeout: float, limits: Limits, interval: float) -> Report | None:
    """Return the report of the rank that stopped first if the run hangs; None while it does not.

    A run hangs when one rank has made no progress for longer than any rank may take where it is, has waited for others
    for nearly as long as torch lets it, or has sent no report for longer than a step may take. The others then wait for
    one of them. In this order, it is:

    1. a rank whose reports have stopped, while others report: its process is stopped or cut off;
    2. a rank that does something else than wait for other ranks;
    3. the rank with the fewest iterations done, then the one that has been idle for longest.
    """
    if not table:
        return None
    idle = max(report.idle + report.silent for report in table)
    doomed = max(report.waited for report in table) > DOOMED * limits.collective
    stopped = any(report.silent > timeout and report.steps and report.phase != phases.END for report in table)
    if not doomed and not stopped and idle <= max(patience(report, timeout, limits) for report in _up_to_date(table)):
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
    """Return the line that names the rank that stopped, where, and what the others do."""
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


def with_silence(table: Mapping[int, Report], silent: Mapping[int, float]) -> list[Report]:
    """Return the reports with the seconds for which the reader has not seen new ones."""
    return [replace(report, silent=silent.get(rank, 0.0)) for rank, report in sorted(table.items())]
