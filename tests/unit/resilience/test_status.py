"""What status.json says of a run's end, which of several errors is the cause, and ranks that cannot be used wait."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from megavlm.command_line.parsing import parse
from megavlm.errors import BadNumbers, Stopped, UserError
from megavlm.resilience import status
from megavlm.resilience.events import events
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
