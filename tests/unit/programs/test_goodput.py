"""`megavlm goodput` on the files of runs: the summary, and JSON."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from megavlm.programs.charts import duration
from megavlm.programs.goodput import main

BEGIN = datetime(2026, 11, 22, tzinfo=UTC)


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
    assert main([str(written(tmp_path / "run", devices=4))]) == 0
    said = capsys.readouterr().out
    assert "run: 17.4% of 1 min 55 s is training; 20 iterations, 1 restart, 1 min 21 s until the next step" in said
    assert " 52.2%      60.0 s  hang: " in said
    assert main([str(tmp_path / "run"), "--json"]) == 0
    (run,) = json.loads(capsys.readouterr().out)["runs"]
    assert run["wall_s"] == sum(run["seconds"].values()) == 115.0
    assert run["seconds"] == {
        "training": 20.0, "lost steps": 5.0, "hang": 60.0, "downtime": 5.0, "start": 20.0, "load": 5.0
    }  # fmt: skip
    (recovery,) = run["recoveries"]
    assert (recovery["kind"], recovery["lost_steps"], recovery["to_step"]) == ("hang", 5, 81.0)


def test_a_folder_without_a_run_is_refused_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main([str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.04, "0 s"), (2.0, "2 s"), (9.96, "10 s"), (59.6, "1 min"), (200.4, "3 min 20 s"), (7_500.0, "2 h 5 min")],
)
def test_durations_are_in_words(seconds: float, words: str):
    assert duration(seconds) == words
