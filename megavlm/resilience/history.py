"""Compute what a run's time went to, from its events and metrics. Pure functions, without torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

TRAINING = "training"
SAVES = "saves"
SLOW = "slow rank"
SKIPPED = "skipped steps"
LOST = "steps lost"  # done after the last checkpoint, and done again
HUNG = "hang"
RESTART = "restart"
KILLED = "steps lost and restart"  # the run was killed and could not say when
OTHER = "evaluation and other"
CAUSES = (SAVES, SLOW, SKIPPED, LOST, HUNG, RESTART, KILLED, OTHER)
_ENDS = ("stop", "failure", "hang")
_NOTABLE = 0.1


@dataclass(frozen=True)
class History:
    """Seconds of a run by what they went to; they add up to `wall`, from the first event to the last."""

    wall: float
    seconds: Mapping[str, float]  # TRAINING, and of CAUSES those that took time
    restarts: int
    recoveries: tuple[float, ...]  # seconds from each end of an attempt that is known to the next start

    @property
    def goodput(self) -> float:
        """Return the fraction of the time that went into steps that count."""
        return self.seconds.get(TRAINING, 0.0) / self.wall if self.wall > 0 else 0.0


def history_of(events: Sequence[Mapping[str, Any]], records: Sequence[Mapping[str, Any]]) -> History | None:
    """Return what a run's time went to; None if it has no two events, so that its length is not known.

    `records` are the lines of metrics.jsonl, which has each iteration that counts once. What an attempt did after the
    checkpoint from which the next one goes on is lost: everything between the time of that checkpoint and the start.
    """
    timed = [(_time(event), event) for event in events if _time(event) is not None]
    moments = [(time, event) for time, event in timed if time is not None]
    if len(moments) < 2 or moments[-1][0] <= moments[0][0]:
        return None
    wall = moments[-1][0] - moments[0][0]
    seconds = dict.fromkeys((TRAINING, *CAUSES), 0.0)
    seconds |= _of_steps(records)
    lost, recoveries = _of_restarts(moments)
    for cause, value in lost.items():
        seconds[cause] += value
    for _, event in moments:
        if event.get("kind") == "save":
            seconds[SAVES] += _number(event.get("seconds"))
    known = sum(seconds.values())
    if known > wall:  # the last step may end after the last event
        seconds[TRAINING] = max(0.0, seconds[TRAINING] - (known - wall))
    seconds[OTHER] += max(0.0, wall - known)
    starts = sum(event.get("kind") == "start" for _, event in moments)
    found = {name: value for name, value in seconds.items() if value > 0}
    return History(wall, found, max(0, starts - 1), tuple(recoveries))


def _of_steps(records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the seconds of steps: useful, skipped, and what a slow rank added to those since the report before."""
    seconds = {TRAINING: 0.0, SKIPPED: 0.0, SLOW: 0.0}
    since = 0.0
    for record in records:
        step = _number(record.get("step_time_s"))
        if record.get("updated") is False:
            seconds[SKIPPED] += step
            continue
        seconds[TRAINING] += step
        since += step
        if "slowest_rank_excess" in record:
            excess, own = _number(record["slowest_rank_excess"]), _number(record.get("slowest_rank_s"))
            if excess > _NOTABLE and step > 0:
                # Of its own time per step, this part is above the median rank's.
                share = min(1.0, own * excess / (1 + excess) / step)
                seconds[SLOW] += since * share
                seconds[TRAINING] -= since * share
            since = 0.0
    return seconds


def _of_restarts(moments: Sequence[tuple[float, Mapping[str, Any]]]) -> tuple[dict[str, float], list[float]]:
    """Return the seconds lost to restarts, by cause, and how long each recovery took whose begin is known."""
    lost = {LOST: 0.0, HUNG: 0.0, RESTART: 0.0, KILLED: 0.0}
    recoveries: list[float] = []
    for place, (start, event) in enumerate(moments):
        earlier = moments[:place]
        if event.get("kind") != "start" or not earlier:
            continue
        anchor = next(
            (
                time
                for time, before in reversed(earlier)
                if before.get("kind") in ("save", "start") and before.get("iteration") == event.get("iteration")
            ),
            earlier[-1][0],
        )
        last_start = max((time for time, before in earlier if before.get("kind") == "start"), default=anchor)
        anchor = max(anchor, last_start)
        end = next(((t, e) for t, e in earlier if t >= anchor and e.get("kind") in _ENDS), None)
        if end is None:
            lost[KILLED] += start - anchor
            continue
        hung = min(_number(end[1].get("seconds")), end[0] - anchor) if end[1].get("kind") == "hang" else 0.0
        lost[HUNG] += hung
        lost[LOST] += end[0] - anchor - hung
        lost[RESTART] += start - end[0]
        recoveries.append(start - end[0] + hung)
    return lost, recoveries


def _time(event: Mapping[str, Any]) -> float | None:
    try:
        return datetime.fromisoformat(str(event.get("time"))).timestamp()
    except ValueError:
        return None


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) and value == value else 0.0
