"""What a run's time went to: of simulated runs whose truth is known, to the microsecond, and of any files."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megavlm.programs.goodput import recoveries_of
from megavlm.programs.history import (
    CAUSES,
    DATA,
    DOWNTIME,
    HUNG,
    LOAD,
    LOST,
    OTHER,
    REWOUND,
    SAVES,
    SKIPPED,
    SLOW,
    START,
    TRAINING,
    VALIDATION,
    history_of,
)  # fmt: skip
from megavlm.resilience.events import KINDS

BEGIN = datetime(2026, 11, 22, tzinfo=UTC)
ROOT = Path(__file__).parents[3]


@dataclass
class Simulated:
    """A run that does what it is told, writes its files, and notes what its time truly went to."""

    now: int = 0  # microseconds
    events: list[dict[str, Any]] = field(default_factory=list)
    records: list[dict[str, Any]] = field(default_factory=list)
    spent: list[tuple[int, int, str]] = field(default_factory=list)  # begin, end, cause
    iteration: int = 0
    saved: int = 0
    stall: int = 0  # of the save before the next step
    attempt: int = 0

    def pass_(self, duration: int, cause: str) -> None:
        self.spent.append((self.now, self.now + duration, cause))
        self.now += duration

    def event(self, kind: str, **more: Any) -> None:
        self.events.append({"time": _iso(self.now), "kind": kind, "attempt": self.attempt, **more})

    def start(self, down: int, start: int, load: int) -> None:
        kept = [record for record in self.records if record["iteration"] <= self.saved]
        lost = self.records[len(kept) :]
        more: dict[str, Any] = {"lost_steps": len(lost), "last_lost": lost[-1]["time"]} if lost else {}
        if lost:
            started = max(_micros(event["time"]) for event in self.events if event["kind"] == "start")
            self._lose(max(started, _micros(kept[-1]["time"]) if kept else 0), _micros(lost[-1]["time"]))
        self.pass_(down, DOWNTIME)
        self.pass_(start, START)
        self.pass_(load, LOAD)
        self.records, self.iteration = kept, self.saved
        self.event(
            "start", iteration=self.saved, seconds=(start + load) / 1e6, load_seconds=load / 1e6, world=4, **more
        )

    def _lose(self, after: int, until: int) -> None:
        """What was done between two moments of an attempt was for nothing."""
        steps = (TRAINING, DATA, SLOW, SKIPPED, REWOUND, SAVES, VALIDATION, OTHER)
        self.spent = [
            (
                a,
                b,
                LOST if a >= after and b <= until and cause in steps and (a, cause) != (after, VALIDATION) else cause,
            )
            for a, b, cause in self.spent
        ]  # the evaluation after the last step that is kept is not done again

    def step(self, duration: int, data: int = 0, slow: int = 0, **more: Any) -> None:
        self.iteration += 1
        self.pass_(data, DATA)
        self.pass_(duration, TRAINING)
        self.pass_(slow, SLOW)
        whole = duration + data + slow
        record = {
            "iteration": self.iteration,
            "time": _iso(self.now),
            "step_time_s": whole / 1e6,
            "data_time_s": data / 1e6,
        }
        if self.stall:
            record["save_stall_s"] = self.stall / 1e6
        # Half of the slowest rank's own time is above the median's.
        record |= {"slowest_rank_s": 2 * slow / 1e6, "slowest_rank_excess": 1.0 if slow else 0.0}
        self.stall = 0
        self.records.append({**record, **more})

    def skip(self, duration: int, search: int) -> None:
        self.step(duration, updated=False)
        self.spent[-3:] = [(a, b, SKIPPED) for a, b, _ in self.spent[-3:]]
        self.pass_(search, SKIPPED)
        self.event("skip", iteration=self.iteration, reason="NaN")

    def rewind(self, duration: int, load: int) -> None:
        self.skip(duration, 0)
        since = max((_micros(r["time"]) for r in self.records if r["iteration"] <= self.saved), default=0)
        undone = (TRAINING, DATA, SLOW)
        self.spent = [(a, b, REWOUND if a >= since and cause in undone else cause) for a, b, cause in self.spent]
        self.pass_(load, REWOUND)
        self.event("rewind", iteration=self.iteration, back_to=self.saved)

    def save(self, stall: int) -> None:
        if self.iteration > self.saved:
            self.pass_(stall, SAVES)
            self.stall += stall
            self.saved = self.iteration
            self.event("save", iteration=self.iteration, seconds=9.0)

    def evaluate(self, duration: int) -> None:
        if self.records and _micros(self.records[-1]["time"]) == self.now:
            self.pass_(duration, VALIDATION)
            self.records[-1]["eval_time_s"] = duration / 1e6

    def truth(self) -> dict[str, int]:
        found: Counter[str] = Counter()
        for begin, end, cause in self.spent:
            found[cause] += end - begin
        return {cause: value for cause, value in found.items() if value}


def _iso(micros: int) -> str:
    return (BEGIN + timedelta(microseconds=micros)).isoformat(timespec="microseconds")


def _micros(time: str) -> int:
    return (datetime.fromisoformat(time) - BEGIN) // timedelta(microseconds=1)


def test_what_a_hang_costs():
    run = Simulated()
    run.start(0, 20_000_000, 0)
    run.step(1_000_000, data=300_000)
    run.save(50_000)
    run.step(2_000_000)
    run.step(2_000_000)
    run.pass_(60_000_000, HUNG)
    run.event("hang", iteration=3, reason="rank 1 has made no progress")
    run.start(7_000_000, 15_000_000, 2_000_000)
    run.step(2_000_000)
    past = history_of(run.events, run.records)
    assert past is not None
    assert past.seconds == {
        TRAINING: 3.0, DATA: 0.3, LOST: 4.05, HUNG: 60.0, DOWNTIME: 7.0, START: 35.0, LOAD: 2.0
    }  # fmt: skip
    assert (past.microseconds, past.wall) == (run.truth(), run.now / 1e6)
    assert recoveries_of(past) == [{"kind": "hang", "lost_steps": 2, "to_step": 86.0}]
    assert past.goodput == pytest.approx(3.0 / past.wall)


SHORT = st.integers(1, 3_000_000)
ACTION = st.one_of(
    st.tuples(st.just("step"), SHORT, st.integers(0, 500_000)),
    st.tuples(st.just("step"), SHORT, st.integers(0, 500_000), st.integers(0, 500_000)),
    st.tuples(st.just("skip"), SHORT, SHORT),
    st.tuples(st.just("rewind"), SHORT, SHORT),
    st.tuples(st.just("save"), SHORT),
    st.tuples(st.just("evaluate"), SHORT),
    st.tuples(st.just("kill"), SHORT, SHORT, SHORT),
    st.tuples(st.just("hang"), SHORT, SHORT, SHORT),
    st.tuples(st.just("stop"), SHORT, SHORT, SHORT),
)


@given(st.lists(ACTION, max_size=40), SHORT)
@settings(max_examples=100, deadline=None)
def test_any_run_is_accounted_for_to_the_microsecond(actions, start: int):
    run = Simulated()
    run.start(0, start, 0)
    run.step(1_000_000)
    for name, *numbers in actions:
        if name in ("step", "skip", "rewind", "save", "evaluate"):
            getattr(run, name)(*numbers)
            continue
        if name != "stop":
            run.step(1_000)  # what comes after the last step of an attempt that is killed leaves no trace
        if name == "hang":
            run.pass_(5_000_000, HUNG)
            run.event("hang")
        elif name == "stop":
            run.pass_(1_000, SAVES)
            run.saved = run.iteration
            run.event("save", iteration=run.iteration)
            run.event("stop", reason="SIGTERM received")
        run.stall = 0
        run.attempt += 1
        run.start(*numbers)
        run.step(1_000_000)
    run.step(1)
    past = history_of(run.events, run.records)
    assert past is not None
    assert past.microseconds == run.truth()


WORDS = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=3), st.lists(st.integers()))
TIME = st.one_of(WORDS, st.integers(-10, 4_000).map(lambda second: _iso(second * 1_000_000)))
EVENTS = st.fixed_dictionaries(
    {"time": TIME, "kind": st.one_of(WORDS, st.sampled_from(sorted(KINDS)), st.just("start"))},
    optional={"seconds": WORDS, "load_seconds": WORDS, "last_lost": TIME, "lost_steps": WORDS, "iteration": WORDS,
              "back_to": WORDS, "attempt": st.integers(0, 1)},
)  # fmt: skip
RECORDS = st.fixed_dictionaries(
    {"time": TIME, "iteration": WORDS, "step_time_s": WORDS},
    optional={"data_time_s": WORDS, "updated": WORDS, "save_stall_s": WORDS, "eval_time_s": WORDS,
              "sample_time_s": WORDS,
              "slowest_rank_s": WORDS, "slowest_rank_excess": WORDS, "slowest_rank_phase": st.just("data")},
)  # fmt: skip


@given(st.lists(EVENTS, max_size=12), st.lists(RECORDS, max_size=12))
@settings(max_examples=100, deadline=None)
def test_whatever_the_files_say_the_causes_add_up_to_the_wall_time(events, records):
    past = history_of(events, records)
    if past is None:
        return
    assert sum(past.microseconds.values()) == past.attempts[-1].until - past.begin
    assert all(value > 0 for value in past.microseconds.values())
    assert set(past.microseconds) <= set(CAUSES)
    assert sum(past.seconds.values()) == pytest.approx(past.wall, rel=1e-12)
    assert len(recoveries_of(past)) == past.restarts


def test_a_slow_rank_that_waits_for_data_is_not_counted_twice():
    run = Simulated()
    run.start(0, 1, 0)
    phase = {"slowest_rank_phase": "data", "slowest_rank_s": 1.0, "slowest_rank_excess": 1.0}
    run.step(600_000, data=400_000, **phase)
    past = history_of(run.events, run.records)
    assert past is not None
    assert past.seconds == {TRAINING: 0.5, DATA: 0.4, SLOW: 0.1, START: 1e-6}


def test_processes_that_failed_before_they_trained_are_downtime():
    run = Simulated()
    run.start(0, 1_000_000, 0)
    run.step(1_000_000)
    run.save(1)
    run.pass_(30_000_000, DOWNTIME)  # killed; the processes after it find no GPU, say
    run.attempt = 1
    run.event("failure", reason="out of memory")
    run.attempt = 2
    run.stall = 0
    run.start(1_000_000, 1_000_000, 0)
    run.step(1_000_000)
    past = history_of(run.events, run.records)
    assert past is not None
    assert past.microseconds[DOWNTIME] == 31_000_001, "the stall of the save was never told by a later step"


def test_a_run_without_a_start_or_without_time_has_no_history():
    assert history_of([], []) is None
    assert history_of([{"kind": "start", "time": _iso(0)}], []) is None
    assert history_of([{"kind": "start"}, {"time": "yesterday", "kind": "start"}], []) is None


def test_the_page_lists_every_cause():
    page = (ROOT / "docs/long-runs.md").read_text()
    section = page.split("## Goodput")[1].split("\n## ")[0]
    assert dict(re.findall(r"^\| `([a-z ]+)` \| (.+) \|$", section, re.MULTILINE)) == CAUSES
