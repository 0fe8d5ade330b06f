"""Find what slows a run down: `megavlm why RUN_DIR` reads the run's records of its steps, events and starts."""

from __future__ import annotations

import argparse
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megavlm.command_line.commands import Parser, reported
from megavlm.errors import UserError
from megavlm.program import program
from megavlm.programs import history
from megavlm.programs.history import NOTABLE, History, moment_of, number, past_of, records_of
from megavlm.resilience import phases
from megavlm.resilience.events import events, read_status
from megavlm.resilience.lock import silent_since

_LEAST = 0.02  # smaller shares of the time are not reported


@reported("why")
def main(argv: Sequence[str]) -> int:
    """Return the exit status: 0 done, 2 RUN_DIR has no records of a run."""
    run_dir = _parser().parse_args(argv).run_dir
    steps, happened = records_of(run_dir), events(run_dir)
    start = start_line(happened, phases.unfinished(run_dir), read_status(run_dir), silent_since(run_dir))
    if not steps and start is None:
        raise UserError(f"{run_dir} has no metrics.jsonl with a step: name the folder of a run")
    if start is not None:
        print(start)
    if not steps:
        return 0
    past = past_of(run_dir)
    print(f"{past.goodput:.1%} of {past.wall:,.0f} s went into training ({len(steps)} iterations)")
    found = findings(past, steps, happened)
    print("\n".join(str(each) for each in found) if found else "nothing takes as much as 2 % of the time")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(description="Say what holds a run back, and the remedy.", allow_abbrev=False)
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="Folder of the run, as given to --run-dir.")
    return parser


@dataclass(frozen=True)
class Finding:
    """A cause that takes `share` of the run's time from training, and its remedy."""

    share: float
    what: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.share:5.1%}  {self.what}\n       → {self.remedy}"


def start_line(
    events: Sequence[Mapping[str, Any]],
    unfinished: Mapping[str, Any],
    status: Mapping[str, Any],
    silent: float | None = None,
    *,
    now: float | None = None,
) -> str | None:
    """Return a line on how long the last start took, or has taken until `now`; None if nothing is known of it.

    `unfinished` is the result of `phases.unfinished`, a start without its first step. `status` has the time at which
    a start failed. A start was killed if its lock has been `silent` since a time (`silent_since`).
    """
    state = status.get("state")
    if unfinished and state not in ("finished", "stopped"):
        began, since = _number(unfinished.get("began")), _number(unfinished.get("since"))
        failed = moment_of(status) if state == "failed" else None
        ended, first = None, "the run has been starting for"
        if failed is not None and failed >= since - 1:  # status.json has whole seconds
            ended, first = failed, "the start ended after"
        elif silent is not None:
            ended, first = silent, "the start was killed after"
        until = max(since, ended or now or time.time())
        before = _parts(unfinished.get("phases"))
        words = f"{first} {until - began:,.1f} s: it was {phases.PARTS[unfinished['part']]} for {until - since:,.1f} s"
        return f"{words} (before that: {before})" if before else words
    started = next((event for event in reversed(events) if event.get("kind") == "started"), None)
    if started is None:
        return None
    took = f"the last start took {_number(started.get('seconds')):,.1f} s to the end of its first step"
    return f"{took}: it was {_parts(started.get('phases'))}"


def _parts(seconds: Any) -> str:
    """Describe the parts of a start that took over 2 % of its time, longest first."""
    known = {name: _number(each) for name, each in seconds.items()} if isinstance(seconds, Mapping) else {}
    longest = sorted((part for part in phases.PARTS if part in known), key=lambda part: -known[part])
    least = _LEAST * sum(known.values())
    return ", ".join(f"{phases.PARTS[part]} for {known[part]:,.1f} s" for part in longest if known[part] > least)


def findings(past: History, records: Sequence[Mapping[str, Any]], events: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """Return the causes that take at least 2 % of a run's time from training, largest first.

    `past` is the history of these records and events.
    """
    times = f"{past.restarts} restart{'s'[: past.restarts != 1]}"
    hangs = [str(event.get("reason")) for event in events if event.get("kind") == "hang"]
    seconds = defaultdict(float, past.seconds)
    # The first start is no restart.
    starting = (seconds[history.START] + seconds[history.LOAD]) * past.restarts / (past.restarts + 1)
    seconds[history.DOWNTIME] += starting
    for phase in (phases.PIPELINE, phases.COMMUNICATION):
        seconds[phase] = _mean_of_phase(phase, records) * len(records)
    causes = {
        history.DATA: (
            "the ranks wait for data",
            f"raise --num-workers; see what samples cost with {program('preview')}",
        ),
        phases.PIPELINE: (
            "pipeline stages wait for one another (the bubble, or uneven stages)",
            f"raise --global-batch-size or --vpp, lower --pp, or let {program('plan')} cut the stages",
        ),
        phases.COMMUNICATION: (
            "ranks wait for gradients and sums of other ranks",
            "keep --overlap-grad-reduce on, raise --global-batch-size, or look at the slowest rank",
        ),
        history.SLOW: _slow_rank(records),
        history.SKIPPED: ("steps are skipped (overflow or bad numbers)", "lower --lr; look at grad_norm and loss"),
        history.SAVES: ("the run stands still while it saves", "raise --save-interval"),
        history.LOST: (f"steps after the last checkpoint were lost ({times})", "lower --save-interval"),
        history.DOWNTIME: (f"starting again ({times})", "see RUN_DIR/events.jsonl for the reasons"),
        history.REWOUND: (
            "rewinds undo steps",
            "use --on-spike skip, raise --spike-factor, or lower --save-interval",
        ),
        history.HUNG: (
            f"hangs, the last: {hangs[-1] if hangs else ''}",
            "look at RUN_DIR/hang-*, exclude the node that is named, or lower --hang-timeout",
        ),
        history.VALIDATION: ("validation", "raise --eval-interval, or lower --eval-iters"),
        history.OTHER: ("logging and all else between steps", "look at the file system of RUN_DIR"),
    }
    found = [Finding(seconds[cause] / past.wall, what, remedy) for cause, (what, remedy) in causes.items()]
    return sorted((each for each in found if each.share >= _LEAST), key=lambda each: -each.share)


def _mean_of_phase(phase: str, records: Sequence[Mapping[str, Any]]) -> float:
    """Return the mean seconds per step of a phase, over the records that have `phase_seconds`."""
    by_phase = [record["phase_seconds"] for record in records if isinstance(record.get("phase_seconds"), Mapping)]
    return sum(_number(each.get(phase)) for each in by_phase) / max(len(by_phase), 1)


def _slow_rank(records: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    """Describe the rank that most reports name as slowest, and return this with a remedy."""
    slow = [record for record in records if _number(record.get("slowest_rank_excess")) > NOTABLE]
    counts = Counter((record.get("slowest_rank"), record.get("slowest_rank_phase")) for record in slow)
    ((rank, phase), times), *_ = [*counts.most_common(1), ((None, None), 0)]
    who = f"rank {rank} is slower than the others in {phase}" if 2 * times > len(slow) else "now one rank, now another"
    where = "look at its data workers and its storage" if phase == phases.DATA else "replace its node"
    what = f"{who} ({times} of {len(slow)} reports), and the others wait for it"
    return what, f"{where}; {program('doctor')} checks a machine"


def _number(value: object) -> float:
    return number(value) or 0.0
