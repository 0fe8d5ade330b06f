"""Show how runs spent their time: `megavlm goodput RUN_DIR…` reads only their metrics.jsonl and events.jsonl."""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from megavlm.command_line.commands import Parser, reported
from megavlm.programs.history import ASKED, CAUSES, TRAINING, History, devices_of, duration, past_of, read_runs

KILLED = "killed"


@reported("goodput")
def main(argv: Sequence[str]) -> int:
    """Return the exit status: 0 done, 2 an argument is wrong (reported in one line)."""
    given = _parser().parse_args(argv)
    summaries = read_runs(given.runs, lambda run: summary(run.resolve().name, past_of(run)))
    if given.json:
        print(json.dumps({"runs": summaries}, indent=2))
    else:
        print("\n".join(line for each in summaries for line in _lines(each)))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(description="Say where the time of runs went.", allow_abbrev=False)
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN_DIR", help="Folders of runs, as given to --run-dir.")
    parser.add_argument("--json", action="store_true", help="Print the summary, and what each restart cost, as JSON.")
    return parser


def _lines(run: dict[str, Any]) -> list[str]:
    wall, restarts, back = run["wall_s"], run["restarts"], run["typical_recovery_s"]
    seconds = sorted(run["seconds"].items(), key=lambda item: (item[0] != TRAINING, -item[1]))
    return [
        f"{run['run']}: {run['goodput']:.1%} of {duration(wall)} is training, {run['kept']:.1%} steps that stay; "
        f"{run['iterations']:,} iterations, {restarts} restart{'s'[: restarts != 1]}"
        + ("" if back is None else f", {duration(back)} until the next step"),
        *(f"{value / wall:6.1%} {value:9.1f} s  {cause}: {CAUSES[cause]}" for cause, value in seconds),
    ]


def summary(name: str, history: History) -> dict[str, Any]:
    """Return how a run spent its time, and the cost of each restart, as a dictionary for JSON.

    `goodput` is the fraction of the time that went into training; `kept` is the fraction of steps that count, including
    their waits. `typical_recovery_s` is the median of `to_step` (`recoveries_of`), without attempts that had finished.
    """
    recoveries = recoveries_of(history)
    known = [each["to_step"] for each in recoveries if each["kind"] != "finish" and each["to_step"] is not None]
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
        "recoveries": recoveries,
    }


def recoveries_of(history: History) -> list[dict[str, Any]]:
    """Return for each restart how the previous attempt ended, and how long the run took to train again.

    `kind` is the event that ended the attempt, or KILLED. `to_step` has the seconds from the attempt's last step (or
    from its end, if a stop was requested or the run finished) to the end of the next step that was not lost; None if
    there is none.
    """
    found = []
    for number, (ended, later) in enumerate(pairwise(history.attempts), start=1):
        time, event = ended.end or (ended.alive, {})
        kind, lost = str(event.get("kind", KILLED)), later.start.get("lost_steps")
        back = next((step.end for attempt in history.attempts[number:] for step in attempt.steps), None)
        to_step = None if back is None else (back - (time if kind in ASKED else ended.alive)) / 1e6
        found.append({"kind": kind, "lost_steps": lost if isinstance(lost, int) else 0, "to_step": to_step})
    return found
