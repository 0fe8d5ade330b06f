"""Divide a run's time among causes (training, waits, saves, restarts, …), from its events and metrics, without torch.

An attempt is the life of one set of processes. It begins and ends with its processes, and the next attempt resumes from
a checkpoint: steps after that checkpoint are lost. metrics.jsonl has each iteration once, with the time at which its
step ended; the event `start` has the number of lost steps whose records the attempt found there, and the end of the
last one.
"""

from __future__ import annotations

import sys
from bisect import bisect_left, bisect_right
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from megavlm.errors import UserError
from megavlm.resilience.events import events, json_lines

TRAINING = "training"
DATA = "data"
SLOW = "slow rank"
SAVES = "saves"
VALIDATION = "validation"
SKIPPED = "skipped steps"
REWOUND = "rewind"
LOST = "lost steps"
HUNG = "hang"
DOWNTIME = "downtime"
START = "start"
LOAD = "load"
OTHER = "other"

# The causes among which a run's time is divided; docs/long-runs.md has the same table.
CAUSES = {
    TRAINING: "steps that count, without their waits for data and for a slow rank",
    DATA: "waits for data within steps that count",
    SLOW: "waits for a rank that is more than 10 % slower than the median, within steps that count",
    SAVES: "training stood still for a save",
    VALIDATION: "the loss on held-out samples was measured, or held-out questions were answered",
    SKIPPED: "steps that did not change the weights, and the search for what made their numbers bad",
    REWOUND: "steps that a rewind undid, and the return to the checkpoint",
    LOST: "steps after the checkpoint from which the next attempt went on, and the step under way at the end",
    HUNG: "no rank made progress, until the run ended itself",
    DOWNTIME: "nothing trained: from the end of an attempt until the processes of the next began",
    START: "imports, process groups, model and data, until the first step",
    LOAD: "the checkpoint was read",
    OTHER: "what is left between steps",
}
_ENDS = ("hang", "failure", "stop", "finish")
ASKED = ("stop", "finish")  # ends before which the run saved
_NOTES = {"skip": SKIPPED, "rewind": REWOUND}  # events written at the end of the time between steps that they cost
_LARGEST = 1e15  # larger values of a file are taken for damage
NOTABLE = 0.1  # a rank that is slower than the median by this fraction is slow


T = TypeVar("T")
Moment = tuple[int, Mapping[str, Any]]  # an event and its time, in microseconds since 1970


class PastStep(NamedTuple):
    """A step recorded in metrics.jsonl; times and durations in microseconds."""

    iteration: int
    begin: int
    end: int
    updated: bool
    data: int  # wait for data
    slow: int  # wait for a slow rank
    stall: int  # wait for a save before the step
    evaluation: int  # validation after the step


@dataclass(frozen=True)
class PastAttempt:
    """An attempt of a run; times in microseconds since 1970. `until` is the start of the next, or the run's end."""

    began: int  # start of the processes
    started: int  # start of training
    until: int
    start: Mapping[str, Any]  # the event `start`
    events: Sequence[Moment]
    steps: Sequence[PastStep]  # steps that count, were skipped or undone; no lost steps
    alive: int  # end of the last step, also of a lost one; `started` without steps

    @property
    def end(self) -> Moment | None:
        """Return the event that ended the attempt; None if it was killed or still runs.

        Events of later processes that failed before they trained are not taken for it.
        """
        number = self.start.get("attempt")
        own = ((time, event) for time, event in self.events if time >= self.started and event.get("attempt") == number)
        return next((moment for moment in own if moment[1].get("kind") in _ENDS), None)


@dataclass(frozen=True)
class History:
    """The time of a run divided among causes, from the start of its first process to its last event or step."""

    microseconds: Mapping[str, int]  # by cause, in the order of CAUSES, zeros left out; the sum is the whole time
    attempts: tuple[PastAttempt, ...]

    @property
    def seconds(self) -> Mapping[str, float]:
        return {cause: value / 1e6 for cause, value in self.microseconds.items()}

    @property
    def wall(self) -> float:
        """Return the whole time of the run in seconds."""
        return sum(self.microseconds.values()) / 1e6

    @property
    def restarts(self) -> int:
        return len(self.attempts) - 1

    @property
    def goodput(self) -> float:
        """Return the fraction of the time that went into training."""
        return self.seconds.get(TRAINING, 0.0) / self.wall

    @property
    def kept(self) -> float:
        """Return the fraction of the time that went into steps that count, including their waits."""
        return sum(self.seconds.get(cause, 0.0) for cause in (TRAINING, DATA, SLOW)) / self.wall


def history_of(happened: Sequence[Mapping[str, Any]], records: Sequence[Mapping[str, Any]]) -> History | None:
    """Divide a run's time among causes; None if no event is a start, or no time has passed since.

    `happened` has the run's events, `records` the lines of metrics.jsonl. Those without a time are ignored.
    """
    dated = [(_time(event), event) for event in happened]
    moments = sorted(((time, event) for time, event in dated if time is not None), key=lambda moment: moment[0])
    steps = _steps(records)
    attempts = _attempts(moments, steps)
    if not attempts or attempts[-1].until <= attempts[0].began:
        return None
    ledger = Ledger(attempts[0].began, attempts[-1].until)
    undone = _undone(steps, moments)
    for attempt in attempts:
        _fill(ledger, attempt, undone)
    ledger.fill(attempts[-1].until, OTHER)
    spent = {cause: ledger.spent[cause] for cause in CAUSES if ledger.spent[cause]}
    return History(spent, tuple(attempts))


def past_of(run_dir: Path) -> History:
    """Divide the time of the run in a folder among causes. Raises UserError for a folder without a start event."""
    past = history_of(events(run_dir), records_of(run_dir))
    if past is None:
        raise UserError(f"{run_dir} has no events.jsonl that says when a run started: name the folder of a run")
    return past


def _attempts(moments: Sequence[Moment], steps: Sequence[PastStep]) -> list[PastAttempt]:
    starts = [(time, event) for time, event in moments if event.get("kind") == "start"]
    if not starts:
        return []
    before = [0, *(time for time, _ in starts)]  # an attempt begins after the attempt before started training
    began = [
        max(early, time - _micro(event.get("seconds"))) for (time, event), early in zip(starts, before, strict=False)
    ]
    last = max(moments[-1][0], steps[-1].end if steps else 0)
    signs = [time for _, event in starts if (time := _time(event, "last_lost")) is not None]
    ends, times = [step.end for step in steps], [time for time, _ in moments]
    found = []
    for (started, start), own, until in zip(starts, began, [*began[1:], last], strict=True):
        held = steps[bisect_right(ends, started) : bisect_right(ends, until)]
        within = moments[bisect_left(times, own) : (bisect_right if until == last else bisect_left)(times, until)]
        shown = [step.end for step in held] + [sign for sign in signs if started < sign <= until]
        found.append(PastAttempt(own, started, until, start, within, held, max(shown, default=started)))
    return found


def _fill(ledger: Ledger, attempt: PastAttempt, undone: set[int]) -> None:
    """Account for an attempt in the ledger, and for the time between the cursor and the attempt."""
    ledger.fill(attempt.began, DOWNTIME)
    ledger.fill(attempt.started - _micro(attempt.start.get("load_seconds")), START)
    ledger.fill(attempt.started, LOAD)
    notes = deque((time, _NOTES[kind]) for time, event in attempt.events if (kind := str(event.get("kind"))) in _NOTES)
    evaluation, rest = 0, START
    for step in attempt.steps:
        ledger.spend(evaluation, VALIDATION, until=step.begin)
        while notes and notes[0][0] <= step.begin:
            ledger.fill(*notes.popleft())
        ledger.spend(step.stall, SAVES, until=step.begin)
        ledger.fill(step.begin, rest)
        if not step.updated or step.end in undone:
            ledger.fill(step.end, REWOUND if step.updated else SKIPPED)
        else:
            ledger.fill(step.begin + step.data, DATA)
            ledger.fill(step.end - step.slow, TRAINING)
            ledger.fill(step.end, SLOW)
        evaluation, rest = step.evaluation, OTHER
    ledger.spend(evaluation, VALIDATION, until=attempt.until)
    ledger.fill(attempt.alive, LOST)
    for note in notes:
        ledger.fill(*note)
    _fill_end(ledger, attempt)


def _fill_end(ledger: Ledger, attempt: PastAttempt) -> None:
    """Account for the time from the last step of an attempt to its end: a save, a hang, or a lost step."""
    if attempt.end is None:
        return
    time, event = attempt.end
    saved = max((at for at, each in attempt.events if each.get("kind") == "save" and at <= time), default=0)
    ledger.fill(time if event.get("kind") in ASKED else saved, SAVES)
    ledger.fill(time, HUNG if event.get("kind") == "hang" else LOST)


def _undone(steps: Sequence[PastStep], moments: Iterable[Moment]) -> set[int]:
    """Return the ends of the steps that a later rewind undid."""
    found: set[int] = set()
    ends = [step.end for step in steps]
    for time, event in moments:
        back_to = event.get("back_to")
        if event.get("kind") != "rewind" or not isinstance(back_to, int):
            continue
        for step in reversed(steps[: bisect_right(ends, time)]):
            if step.iteration <= back_to:
                break
            found.add(step.end)
    return found


def _steps(records: Sequence[Mapping[str, Any]]) -> list[PastStep]:
    """Return the steps of the records that have an end time, in order of time."""
    timed = [(end, record) for record in records if (end := _time(record)) is not None]
    found = []
    for (end, record), slow in zip(timed, _slow([record for _, record in timed]), strict=True):
        iteration, seconds = record.get("iteration"), _micro(record.get("step_time_s"))
        data = min(seconds, _micro(record.get("data_time_s")))
        found.append(
            PastStep(
                iteration=iteration if isinstance(iteration, int) else 0,
                begin=end - seconds,
                end=end,
                updated=record.get("updated") is not False,
                data=data,
                slow=min(slow, seconds - data),
                stall=_micro(record.get("save_stall_s")),
                evaluation=_micro(record.get("eval_time_s")) + _micro(record.get("sample_time_s")),
            )
        )
    return sorted(found, key=lambda step: step.end)


def _slow(records: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return for each step the microseconds that the slowest rank added.

    A report on the slowest rank also applies to the steps since the report before. If that rank waited for data, the
    step's recorded wait for data is subtracted, because it is counted as such.
    """
    found: list[int] = []
    for place, record in enumerate(records):
        if "slowest_rank_excess" not in record:
            continue
        excess, own = number(record["slowest_rank_excess"]) or 0.0, _micro(record.get("slowest_rank_s"))
        extra = int(own * excess / (1 + excess)) if excess > NOTABLE else 0
        in_data = record.get("slowest_rank_phase") == "data"
        for step in records[len(found) : place + 1]:
            found.append(max(0, extra - (_micro(step.get("data_time_s")) if in_data else 0)))
    return found + [0] * (len(records) - len(found))


def _time(event: Mapping[str, Any], name: str = "time") -> int | None:
    """Return a time field of an event or record, in microseconds since 1970; None if missing or malformed."""
    try:
        return round(datetime.fromisoformat(str(event.get(name))).timestamp() * 1e6)
    except (ValueError, OverflowError, OSError):
        return None


def moment_of(event: Mapping[str, Any]) -> float | None:
    """Return the time of an event or of a run's status, in seconds since 1970; None if it has none."""
    found = _time(event)
    return None if found is None else found / 1e6


def _micro(seconds: Any) -> int:
    """Convert seconds to microseconds; 0 for a value that is negative or no number."""
    return round(max(number(seconds) or 0.0, 0.0) * 1e6)


def number(value: object) -> float | None:
    """Convert a value of a file to float; None if it is no number, or not smaller than 1e15 in size."""
    return float(value) if isinstance(value, int | float) and abs(value) < _LARGEST else None


class Ledger:
    """Divides the time from `begin` to `end` among causes: a cursor advances, and each span goes to one cause."""

    def __init__(self, begin: int, end: int) -> None:
        self.spent: Counter[str] = Counter()  # microseconds by cause
        self._cursor, self._end = begin, end

    def fill(self, until: int, cause: str) -> None:
        """Advance the cursor to `until` and add the time to a cause. Nothing changes if the cursor is past `until`."""
        reached = max(self._cursor, min(until, self._end))
        self.spent[cause] += reached - self._cursor
        self._cursor = reached

    def spend(self, duration: int, cause: str, *, until: int) -> None:
        """Advance the cursor by `duration`, at most to `until`, and add the time to a cause."""
        self.fill(min(self._cursor + duration, until), cause)


def duration(seconds: float) -> str:
    """Format seconds with units: 0.4 s, 12 s, 3 min 20 s, 2 h 5 min."""
    if seconds < 10:
        return f"{seconds:.1f} s".replace(".0 ", " ")
    whole = round(seconds)
    units = ((whole // 86_400, "d"), (whole // 3600 % 24, "h"), (whole // 60 % 60, "min"), (whole % 60, "s"))
    first = next(place for place, (number, _) in enumerate(units) if number)
    return " ".join(f"{number} {unit}" for number, unit in units[first : first + 2] if number)


def records_of(run_dir: Path) -> list[dict[str, Any]]:
    """Return the records of metrics.jsonl; lines that cannot be read are left out."""
    return json_lines(run_dir / "metrics.jsonl")


def read_runs(folders: Iterable[Path], read: Callable[[Path], T]) -> list[T]:
    """Read run folders; name on stderr those that cannot be read. Raises UserError if none can be."""
    found, left_out = list[T](), list[UserError]()
    for folder in folders:
        try:
            found.append(read(folder))
        except UserError as error:
            left_out.append(error)
    if not found:
        raise left_out[0]
    print(*(f"left out: {error}\n" for error in left_out), sep="", end="", file=sys.stderr)
    return found


def devices_of(starts: Sequence[Mapping[str, Any]]) -> int:
    """Return the number of ranks in the last start event that has it; 0 if none has."""
    worlds = [world for start in starts if isinstance(world := start.get("world"), int) and world > 0]
    return worlds[-1] if worlds else 0
