"""What status.json says of a run's end, which of several errors is the cause, and ranks that cannot be used wait."""

from __future__ import annotations

import re
import threading
from datetime import datetime
from multiprocessing import Process
from pathlib import Path

import pytest

from megavlm.command_line.parsing import parse
from megavlm.errors import BadNumbers, Stopped, UserError
from megavlm.resilience import status
from megavlm.resilience.events import FILE, KINDS, events, record
from megavlm.resilience.phases import STARTING, StartTimes, unfinished
from megavlm.resilience.status import STOPPED, note_failure, read_status, wait_as_spare, write_status
from megavlm.rules.check import usable_world
from tests.support.training import SMALL


def test_what_is_known_stays_and_the_end_is_told(tmp_path: Path):
    write_status(tmp_path, "running", iteration=3, train_iters=9, checkpoint="iter_3")
    assert read_status(tmp_path)["exit_status"] is None
    write_status(tmp_path, "stopped", iteration=4, reason="SIGTERM received")
    status = read_status(tmp_path)
    assert {name: status[name] for name in ("iteration", "train_iters", "checkpoint", "reason")} == {
        "iteration": 4,
        "train_iters": 9,
        "checkpoint": "iter_3",
        "reason": "SIGTERM received",
    }
    assert status["exit_status"] == STOPPED
    write_status(tmp_path, "finished", iteration=9)
    assert (read_status(tmp_path)["exit_status"], read_status(tmp_path)["reason"]) == (0, None)
    assert [path.name for path in tmp_path.iterdir()] == ["status.json"]


@pytest.mark.parametrize(
    ("error", "status", "reason"),
    [
        (UserError("wrong"), 2, "wrong"),
        (BadNumbers("not finite"), 3, "not finite"),
        (KeyError("x"), 1, "KeyError: 'x'"),
    ],
)
def test_the_first_error_of_an_attempt_is_the_cause(error, status, reason, tmp_path, monkeypatch):
    note_failure(tmp_path, error)
    note_failure(tmp_path, RuntimeError("connection closed by peer"))
    assert (read_status(tmp_path)["exit_status"], read_status(tmp_path)["reason"]) == (status, reason)
    assert len(events(tmp_path)) == 1
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    note_failure(tmp_path, RuntimeError("connection closed by peer"))
    assert read_status(tmp_path)["reason"] == "RuntimeError: connection closed by peer"


@pytest.mark.parametrize(
    ("flags", "launched", "used"),
    [
        ("--spare-ranks --gbs 8", 3, 2),
        ("--spare-ranks --gbs 12", 5, 4),
        ("--spare-ranks --gbs 8 --tp 2", 7, 4),
        ("--spare-ranks --gbs 8 --tp 2", 1, 1),  # refused: TP needs 2
        ("--spare-ranks --gbs 8", 8, 8),
        ("--gbs 8", 3, 3),
        ("--spare-ranks --micro-batch-size 0", 3, 3),
    ],
)
def test_as_many_ranks_train_as_can(flags: str, launched: int, used: int):
    assert usable_world(parse([*SMALL, *flags.split()]), launched) == used


@pytest.mark.parametrize(("state", "raised"), [("finished", None), ("stopped", Stopped), ("failed", SystemExit)])
def test_a_spare_rank_ends_with_the_run_and_not_with_an_earlier_one(state, raised, tmp_path, monkeypatch):
    monkeypatch.setattr(status, "_PAUSE", 0.01)
    write_status(tmp_path, state, iteration=3)
    ended: list[BaseException | None] = []

    def wait() -> None:
        try:
            wait_as_spare(tmp_path, before)
        except BaseException as error:
            ended.append(error)
        else:
            ended.append(None)

    before = read_status(tmp_path)
    thread = threading.Thread(target=wait)
    thread.start()
    write_status(tmp_path, "running", iteration=3)
    thread.join(0.2)
    assert not ended
    write_status(tmp_path, state, iteration=5)
    thread.join(60)
    assert [type(each) for each in ended] == [type(None) if raised is None else raised]


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


def test_the_parts_of_a_start_are_written_once(tmp_path: Path) -> None:
    now = [100.0]
    times = StartTimes(98.0, lambda: now[0])
    times.enter("rendezvous")
    times.run_dir = tmp_path
    for part, second in (("model", 101.0), ("weights", 103.0), ("model", 195.0), ("first_step", 196.0)):
        now[0] = second
        times.enter(part)
        assert unfinished(tmp_path)["part"] == part
        assert unfinished(tmp_path)["since"] == second
    now[0] = 200.0
    times.first_step_done(1, waited=1.5)
    times.enter("first_step")
    times.first_step_done(2, waited=0.0)
    (event,) = events(tmp_path)
    assert (event["kind"], event["iteration"], event["seconds"]) == ("started", 1, 102.0)
    assert event["phases"] == {
        **{"imports": 2.0, "rendezvous": 1.0, "model": 3.0, "weights": 92.0},
        **{"first_batch": 1.5, "first_step": 2.5},
    }
    assert not (tmp_path / STARTING).exists()
    assert unfinished(tmp_path) == {}


def test_other_ranks_and_what_is_no_start_say_nothing(tmp_path: Path) -> None:
    times = StartTimes(0.0)
    times.enter("model")
    times.first_step_done(1, waited=0.0)
    assert [*tmp_path.iterdir()] == []
    for text in ("", "[]", '{"part": ["\\u001b"]}', '{"part": "unknown"}'):
        (tmp_path / STARTING).write_text(text)
        assert unfinished(tmp_path) == {}
