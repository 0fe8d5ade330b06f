"""Where the time of a run went, why it ended, and whether it is begun again."""

from __future__ import annotations

import json
import os
import re
import time
from collections import Counter
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megavlm.errors import BadNumbers, UserError
from megavlm.programs import goodput
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
    START,
    TRAINING,
    VALIDATION,
    duration,
    history_of,
)  # fmt: skip
from megavlm.programs.history import (
    SLOW as SLOWED,
)
from megavlm.programs.train import refuse_retry
from megavlm.programs.why import Finding, findings, main, start_line
from megavlm.resilience.events import KINDS, note_failure, write_status

BEGIN = datetime(2026, 11, 22, tzinfo=UTC)


def event(second: float, kind: str, **more: Any) -> dict[str, Any]:
    return {"time": (BEGIN + timedelta(seconds=second)).isoformat(), "kind": kind, **more}


def steps(number: int, seconds: float = 1.0, begin: float = 0.0, **more: Any) -> list[dict[str, Any]]:
    return [
        {
            "iteration": i + 1,
            "time": (BEGIN + timedelta(seconds=begin + (i + 1) * seconds)).isoformat(),
            "step_time_s": seconds,
            "data_time_s": 0.0,
            "updated": True,
            **more,
        }
        for i in range(number)
    ]


def found_in(records: list[dict[str, Any]], happened: list[dict[str, Any]]) -> list[Finding]:
    past = history_of(happened, records)
    assert past is not None
    return findings(past, records, happened)


SLOW = {"slowest_rank": 5, "slowest_rank_excess": 2.0, "slowest_rank_s": 0.9}


@pytest.mark.parametrize(
    ("changed", "words", "option"),
    [
        ({"data_time_s": 0.6}, "wait for data", "--num-workers"),
        ({"phase_seconds": {"pipeline wait": 0.5}}, "pipeline stages wait", "--vpp"),
        ({"phase_seconds": {"communication": 0.5}}, "wait for gradients", "--overlap-grad-reduce"),
        ({"updated": False}, "skipped", "--lr"),
        ({**SLOW, "slowest_rank_phase": "compute"}, "rank 5 is slower than the others in compute", "megavlm doctor"),
    ],
)
def test_the_first_finding_names_the_cause_and_an_option(changed, words: str, option: str):
    first = found_in(steps(10, **changed), [event(0, "start")])[0]
    assert words in first.what
    assert option in first.remedy


PHASES = {"imports": 3.0, "weights": 92.0, "model": 4.0, "groups": 0.1}
STARTING = {"began": 1000.0, "since": 1007.0, "part": "weights", "phases": {"imports": 3.0, "model": 4.0}}
BEFORE = "(before that: building the model for 4.0 s, importing modules for 3.0 s)"


def status(state: str, second: float) -> dict[str, Any]:
    return {"state": state, "time": datetime.fromtimestamp(second, UTC).isoformat()}


@pytest.mark.parametrize(
    ("happened", "file", "state", "line"),
    [
        ([], {}, {}, None),
        (
            [event(0, "started", seconds=1.0), event(200, "started", seconds=99.1, phases=PHASES)],
            {},
            status("running", 1100),
            "the last start took 99.1 s to the end of its first step: it was reading weights for 92.0 s, building the "
            "model for 4.0 s, importing modules for 3.0 s",
        ),
        (
            [event(0, "started", seconds=1.0)],
            STARTING,
            status("failed", 900),
            f"the run has been starting for 99.0 s: it was reading weights for 92.0 s {BEFORE}",
        ),
        (
            [],
            STARTING,
            status("failed", 1019),
            f"the start ended after 19.0 s: it was reading weights for 12.0 s {BEFORE}",
        ),
        ([], STARTING, status("finished", 1099), None),
        ([], {"part": "groups", "began": "x"}, {}, "the run has been starting for 1,099.0 s"),
    ],
)
def test_a_start_is_told_by_its_parts(happened, file, state, line: str | None):
    found = start_line(happened, file, state, now=1099.0)
    assert found == line or (line is not None and found is not None and found.startswith(f"{line}: it was making"))


def test_a_start_that_was_killed_is_no_longer_starting(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """It leaves its last part, and a lock that nobody touches."""
    (tmp_path / "starting.json").write_text(json.dumps(STARTING))
    (tmp_path / "lock").touch()
    assert main([str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith("the run has been starting for")
    os.utime(tmp_path / "lock", (1012.0, 1012.0))
    assert main([str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"the start was killed after 12.0 s: it was reading weights for 5.0 s {BEFORE}\n"


def test_a_run_that_has_no_step_yet_is_no_mistake(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "starting.json").write_text(json.dumps(STARTING))
    assert main([str(tmp_path)]) == 0
    assert "it was reading weights for" in capsys.readouterr().out


def test_what_lies_between_steps_is_found_in_the_history():
    happened = [
        event(0, "start", iteration=0),
        event(12, "rewind", iteration=10, back_to=6),
        event(70, "hang", iteration=10, reason="rank 1"),
        event(110, "start", iteration=10, seconds=30.0, load_seconds=10.0),
        event(200, "finish", iteration=20),
    ]
    records = [*steps(10), *steps(10, begin=178)]
    records[10] |= {"iteration": 11, "save_stall_s": 50.0}
    for place in range(11, 20):
        records[place]["iteration"] = place + 1
    found = found_in(records, happened)
    shares = {each.remedy: round(each.share, 2) for each in found}
    assert shares == {
        "raise --save-interval": (50 + 12) / 200,  # the stall, and the last save
        "look at RUN_DIR/hang-*, exclude the node that is named, or lower --hang-timeout": 0.29,
        "see RUN_DIR/events.jsonl for the reasons": (10 + (20 + 10 + 18) / 2) / 200,
        "use --on-spike skip, raise --spike-factor, or lower --save-interval": 0.03,
    }


def test_a_run_without_trouble_has_no_finding():
    assert found_in(steps(10), [event(0, "start")]) == []


def test_it_says_what_takes_time_and_which_option_helps(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    lines = [json.dumps(step) for step in steps(10, data_time_s=0.5)]
    (tmp_path / "metrics.jsonl").write_text("\n".join([*lines, "[" * 100_000, "torn {"]))
    (tmp_path / "events.jsonl").write_text(json.dumps(event(0, "start")) + "\n")
    assert main([str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "50.0%  the ranks wait for data" in said
    assert "--num-workers" in said


@pytest.mark.parametrize("program", [main, goodput.main])
def test_a_folder_without_a_run_is_refused_in_one_line(program, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert program([str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def written(folder: Path, *, devices: int) -> Path:
    """The files of a run of 20 steps of one second that hung after ten, in which five were lost."""
    folder.mkdir()

    def at(second: float) -> str:
        return (BEGIN + timedelta(seconds=second)).isoformat()

    def start(second: float, **more: Any) -> dict[str, Any]:
        return {"time": at(second), "kind": "start", "world": devices, **more}

    events = [
        start(10, iteration=0, seconds=10.0),
        {"time": at(80), "kind": "hang", "reason": "rank 1"},
        start(100, iteration=5, seconds=15.0, load_seconds=5.0, lost_steps=5, last_lost=at(20)),
        {"time": at(115), "kind": "finish"},
    ]
    ends = [*range(11, 16), *range(101, 116)]
    records = [{"iteration": i + 1, "time": at(end), "step_time_s": 1.0, "updated": True} for i, end in enumerate(ends)]
    (folder / "events.jsonl").write_text("".join(json.dumps(each) + "\n" for each in events))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    return folder


def test_text_and_json_say_what_time_went_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert goodput.main([str(written(tmp_path / "run", devices=4))]) == 0
    said = capsys.readouterr().out
    assert "run: 17.4% of 1 min 55 s is training, 17.4% steps that stay; 20 iterations, 1 restart, 1 min 21 s" in said
    assert " 52.2%      60.0 s  hang: " in said
    assert goodput.main([str(tmp_path / "run"), str(tmp_path), "--json"]) == 0
    printed = capsys.readouterr()
    (run,) = json.loads(printed.out)["runs"]
    assert printed.err.startswith(f"left out: {tmp_path} has no events.jsonl")
    assert run["wall_s"] == sum(run["seconds"].values()) == 115.0
    assert "17.4% of 1 min 55 s is training, 50.0% steps that stay" in goodput._lines({**run, "kept": 0.5})[0]
    assert run["seconds"] == {
        "training": 20.0, "lost steps": 5.0, "hang": 60.0, "downtime": 5.0, "start": 20.0, "load": 5.0
    }  # fmt: skip
    (recovery,) = run["recoveries"]
    assert (recovery["kind"], recovery["lost_steps"], recovery["to_step"]) == ("hang", 5, 81.0)


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.04, "0 s"), (2.0, "2 s"), (9.96, "10 s"), (59.6, "1 min"), (200.4, "3 min 20 s"), (7_500.0, "2 h 5 min")],
)
def test_durations_are_in_words(seconds: float, words: str):
    assert duration(seconds) == words


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
        steps = (TRAINING, DATA, SLOWED, SKIPPED, REWOUND, SAVES, VALIDATION, OTHER)
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
        self.pass_(slow, SLOWED)
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
        undone = (TRAINING, DATA, SLOWED)
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
    assert sum(past.microseconds.values()) == past.attempts[-1].until - past.attempts[0].began
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
    assert past.seconds == {TRAINING: 0.5, DATA: 0.4, SLOWED: 0.1, START: 1e-6}


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


EARLIER, LATER = -60.0, +60.0  # start of torchrun, in seconds from the failure


def ask(run_dir: Path, *, world: int = 4, launched: float = EARLIER) -> None:
    refuse_retry(run_dir, world=world, launched=time.time() + launched)


@pytest.fixture(autouse=True)
def four_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")


@pytest.mark.parametrize("kind", [UserError, BadNumbers])
def test_the_same_line_and_status_again(kind: type[UserError], tmp_path: Path):
    note_failure(tmp_path, kind("--load nowhere is no checkpoint"))
    with pytest.raises(kind, match=r"^--load nowhere is no checkpoint \(not tried again") as raised:
        ask(tmp_path)
    assert raised.value.status == kind.status


def test_another_torchrun_another_world_and_another_error_are_tried(tmp_path: Path):
    ask(tmp_path)  # there is no status yet
    note_failure(tmp_path, UserError("wrong"))
    ask(tmp_path, launched=LATER)
    ask(tmp_path, world=3)  # an agent has left: other ranks may do
    write_status(tmp_path, "running")
    ask(tmp_path)
    note_failure(tmp_path, RuntimeError("a rank died"))
    ask(tmp_path)
