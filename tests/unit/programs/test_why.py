"""What is said of a run's time: the cause, an option that helps, and what all of it went to."""

from __future__ import annotations

import json
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from megavlm.programs import goodput
from megavlm.programs.charts import duration
from megavlm.programs.history import history_of
from megavlm.programs.why import Finding, findings, main, start_line

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
    assert "run: 17.4% of 1 min 55 s is training; 20 iterations, 1 restart, 1 min 21 s until the next step" in said
    assert " 52.2%      60.0 s  hang: " in said
    assert goodput.main([str(tmp_path / "run"), "--json"]) == 0
    (run,) = json.loads(capsys.readouterr().out)["runs"]
    assert run["wall_s"] == sum(run["seconds"].values()) == 115.0
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
