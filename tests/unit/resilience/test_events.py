"""The history of a run: every event is one whole line, whoever writes, and is described."""

from __future__ import annotations

import re
from datetime import datetime
from multiprocessing import Process
from pathlib import Path

import pytest

from megavlm.resilience.events import FILE, KINDS, events, record

ROOT = Path(__file__).parents[3]


def test_an_event_says_when_who_and_what(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    record(tmp_path, "save", iteration=10, seconds=1.5, folder=tmp_path)
    record(tmp_path, "stop", reason="SIGTERM")
    save, stop = events(tmp_path)
    assert datetime.fromisoformat(save.pop("time")).tzinfo is not None
    assert save == {
        "kind": "save", "attempt": 2, "rank": 3, "iteration": 10, "seconds": 1.5, "folder": str(tmp_path)
    }  # fmt: skip
    assert stop["reason"] == "SIGTERM"
    assert "iteration" not in stop


def _write(folder: Path, number: int) -> None:
    for i in range(200):
        record(folder, "worker", iteration=i, reason=str(number) * 500)


def test_lines_of_several_processes_do_not_mix(tmp_path: Path):
    writers = [Process(target=_write, args=(tmp_path, number)) for number in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert len(events(tmp_path)) == len((tmp_path / FILE).read_bytes().splitlines()) == 800


def test_a_line_that_was_cut_off_hides_no_other(tmp_path: Path):
    record(tmp_path, "start", iteration=0)
    with (tmp_path / FILE).open("ab") as file:
        file.write(b'{"time": "20\n[1]\n')
    record(tmp_path, "finish", iteration=1)
    assert [event["kind"] for event in events(tmp_path)] == ["start", "finish"]


def test_a_folder_that_cannot_be_written_ends_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    record(tmp_path / "not there", "start")
    assert "cannot be written" in capsys.readouterr().err
    assert events(tmp_path / "not there") == []


def test_the_page_lists_every_kind():
    page = (ROOT / "docs/long-runs.md").read_text()
    section = page.split("## Events")[1].split("\n## ")[0]
    assert re.findall(r"^\| `([a-z_]+)` \| .+ \|$", section, re.MULTILINE) == list(KINDS)
