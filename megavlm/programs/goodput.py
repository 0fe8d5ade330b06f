"""Say what runs' time went to: `megavlm goodput RUN_DIR…` reads their metrics.jsonl and events.jsonl, no more."""

from __future__ import annotations

import argparse
import json
import statistics
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megavlm.command_line.commands import Parser, reported
from megavlm.errors import UserError
from megavlm.programs.charts import duration
from megavlm.programs.history import (
    ASKED,
    CAUSES,
    TRAINING,
    History,
    PastAttempt,
    PastStep,
    devices_of,
    history_of,
    records_of,
)
from megavlm.resilience.events import events

KILLED = "killed"


@reported("goodput")
def main(argv: Sequence[str]) -> int:
    """Return the exit status: 0 done, 2 an argument is wrong (reported in one line)."""
    given = _parser().parse_args(argv)
    summaries = []
    for run in given.runs:
        history = history_of(events(run), records_of(run))
        if history is None:
            raise UserError(f"{run} has no events.jsonl that says when a run started: name the folder of a run")
        summaries.append(summary(run.resolve().name, history))
    if given.json:
        print(json.dumps({"runs": summaries}, indent=2))
    else:
        print("\n".join(line for each in summaries for line in _lines(each)))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(description="Say what runs' time went to.", allow_abbrev=False)
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN_DIR", help="Folders of runs, as given to --run-dir.")
    parser.add_argument("--json", action="store_true", help="Print the summary, and what each restart cost, as JSON.")
    return parser


def _lines(run: dict[str, Any]) -> list[str]:
    wall, restarts, back = run["wall_s"], run["restarts"], run["typical_recovery_s"]
    seconds = sorted(run["seconds"].items(), key=lambda item: (item[0] != TRAINING, -item[1]))
    return [
        f"{run['run']}: {run['goodput']:.1%} of {duration(wall)} is training; {run['iterations']:,} iterations, "
        f"{restarts} restart{'s'[: restarts != 1]}"
        + ("" if back is None else f", {duration(back)} until the next step"),
        *(f"{value / wall:6.1%} {value:9.1f} s  {cause}: {CAUSES[cause]}" for cause, value in seconds),
    ]


def summary(name: str, history: History) -> dict[str, Any]:
    """Return what the time of a run went to, and what each restart cost, as JSON.

    `goodput` is the fraction of the time that went into training, `kept` that of steps that count, with what they
    waited for; `typical_recovery_s` is the median from the end of an attempt to the next step that counts.
    """
    recoveries = recoveries_of(history)
    known = [each.to_step for each in recoveries if each.kind != "finish" and each.to_step is not None]
    return {
        "run": name,
        "wall_s": history.wall,
        "goodput": history.goodput,
        "kept": history.kept,
        "seconds": history.seconds,
        "iterations": sum(len(attempt.steps) for attempt in history.attempts),
        "devices": devices_of([attempt.start for attempt in history.attempts]),
        "restarts": history.restarts,
        "typical_recovery_s": statistics.median(known) if known else None,
        "recoveries": [asdict(each) for each in recoveries],
    }


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


def _recovery(
    begin: int, number: int, ended: PastAttempt, later: PastAttempt, steps: Sequence[PastStep], done: int
) -> Recovery:
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
