"""`megavlm goodput` on the files of runs: the page, the summary, JSON, and how throughput grows with devices."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime, timedelta
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from megavlm.programs.charts import duration
from megavlm.programs.goodput import main
from megavlm.programs.history import CAUSES

BEGIN = datetime(2026, 11, 22, tzinfo=UTC)
EVIL = "</style><script>alert(1)</script>\" ' & <img src=x onerror=alert(1)>"


def written(folder: Path, *, devices: int, rate: float = 100.0) -> Path:
    """The files of a run of 20 steps of one second that hung after ten, in which five were lost."""
    folder.mkdir()

    def at(second: float) -> str:
        return (BEGIN + timedelta(seconds=second)).isoformat()

    def start(second: float, **more: Any) -> dict[str, Any]:
        return {"time": at(second), "kind": "start", "world": devices, **more}

    events = [
        start(10, iteration=0, seconds=10.0),
        {"time": at(80), "kind": "hang", "reason": EVIL},
        start(100, iteration=5, seconds=15.0, load_seconds=5.0, lost_steps=5, last_lost=at(20)),
        {"time": at(115), "kind": "finish"},
    ]
    ends = [*range(11, 16), *range(101, 116)]
    records = [
        {"iteration": i + 1, "time": at(end), "step_time_s": 1.0, "updated": True, "tokens_per_second": rate}
        for i, end in enumerate(ends)
    ]
    (folder / "events.jsonl").write_text("".join(json.dumps(each) + "\n" for each in events))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    return folder


class Tags(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        assert not any(name.startswith("on") or name in ("src", "href") for name, _ in attributes)
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_and_the_summary_say_what_time_went_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run, out = written(tmp_path / "run", devices=4), tmp_path / "page" / "goodput.html"
    assert main([str(run), "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert "run: 17.4% of 1 min 55 s is training; 20 iterations, 1 restart, 1 min 21 s until the next step" in said
    assert " 52.2%      60.0 s  hang: " in said
    text = out.read_text()
    tags = Tags(text).seen
    assert "script" not in tags
    assert "img" not in tags
    assert "&lt;/style&gt;&lt;script&gt;" in text
    for cause in ("training", "hang", "lost steps", "downtime", "start", "load"):
        assert CAUSES[cause] in text
    assert "url(" not in text
    assert "http" not in text


def test_json_says_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main([str(written(tmp_path / "run", devices=4)), "--json", "--out", str(tmp_path / "page")]) == 0
    (run,) = json.loads(capsys.readouterr().out)["runs"]
    assert run["wall_s"] == sum(run["seconds"].values()) == 115.0
    assert run["seconds"] == {
        "training": 20.0, "lost steps": 5.0, "hang": 60.0, "downtime": 5.0, "start": 20.0, "load": 5.0
    }  # fmt: skip
    (recovery,) = run["recoveries"]
    assert (recovery["kind"], recovery["lost_steps"], recovery["to_step"], recovery["to_catch_up"]) == (
        "hang", 5, 81.0, 85.0
    )  # fmt: skip


def test_scaling_compares_with_the_smallest_and_marks_what_is_below_four_fifths(tmp_path: Path, capsys):
    runs = [written(tmp_path / f"run-{n}", devices=n, rate=rate) for n, rate in ((8, 600.0), (2, 200.0), (4, 380.0))]
    out = tmp_path / "page.html"
    assert main([*map(str, runs), "--scaling", "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert "run-2: 2 devices, 100 tokens/s each, 100.0% of the smallest\n" in said
    assert "run-4: 4 devices, 95 tokens/s each, 95.0% of the smallest\n" in said
    assert "run-8: 8 devices, 75 tokens/s each, 75.0% of the smallest, below 80%\n" in said
    text = out.read_text()
    Tags(text)
    assert re.findall(r'<b class="warning">(.*?)</b>', text) == ["75.0%"]


@pytest.mark.parametrize("more", [[], ["--scaling"]])
def test_a_folder_without_a_run_is_refused_in_one_line(more, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main([str(tmp_path), *more, "--out", str(tmp_path / "page")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert not (tmp_path / "page").exists()


def test_scaling_needs_two_sizes(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main([str(written(tmp_path / "run", devices=4)), "--scaling", "--out", str(tmp_path / "page")]) == 2
    assert "--scaling compares runs on several numbers of devices" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.04, "0 s"), (2.0, "2 s"), (9.96, "10 s"), (59.6, "1 min"), (200.4, "3 min 20 s"), (7_500.0, "2 h 5 min")],
)
def test_durations_are_in_words(seconds: float, words: str):
    assert duration(seconds) == words
