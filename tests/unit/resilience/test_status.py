"""What status.json says of a run's end, and which of several errors is the cause."""

from __future__ import annotations

from pathlib import Path

import pytest

from megavlm.errors import BadNumbers, UserError
from megavlm.resilience.events import events
from megavlm.resilience.status import STOPPED, note_failure, read_status, write_status


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


def test_what_another_program_wrote_there_is_not_kept(tmp_path: Path):
    """A value nested 900 deep, indented, would make the file larger than what is read."""
    deep = "[" * 900 + "]" * 900
    (tmp_path / "status.json").write_text(f'{{"iteration": 3, "train_iters": {deep}, "other": {deep}}}')
    write_status(tmp_path, "running", checkpoint="iter_3")
    status = read_status(tmp_path)
    assert (status["iteration"], status["checkpoint"]) == (3, "iter_3")
    assert not {"train_iters", "other"} & status.keys()


@pytest.mark.parametrize(
    ("error", "status", "reason"),
    [
        (UserError("wrong"), 2, "wrong"),
        (BadNumbers("not finite"), 3, "not finite"),
        (KeyError("x"), 1, "KeyError: 'x'"),
    ],
)
def test_the_first_error_of_an_attempt_is_the_cause(
    error: Exception, status: int, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    note_failure(tmp_path, error)
    note_failure(tmp_path, RuntimeError("connection closed by peer"))
    assert (read_status(tmp_path)["exit_status"], read_status(tmp_path)["reason"]) == (status, reason)
    assert len(events(tmp_path)) == 1
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    note_failure(tmp_path, RuntimeError("connection closed by peer"))
    assert read_status(tmp_path)["reason"] == "RuntimeError: connection closed by peer"
