"""What the end of each machine's part makes of an attempt, and what a container's exit status tells its platform."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megavlm.programs.launch import node
from megavlm.programs.launch.attempt import Account
from megavlm.programs.launch.meeting import MachinePart


@pytest.mark.parametrize(
    ("parts", "end"),
    [
        ([MachinePart(0), MachinePart(0)], "finished"),
        ([MachinePart(0, gone=True), MachinePart(0)], "finished"),
        (
            [MachinePart(2), MachinePart(75), MachinePart(None)],
            "mistake",
        ),  # torchrun ends the ranks beside it by SIGTERM
        ([MachinePart(3), MachinePart(None, gone=True)], "bad numbers"),
        ([MachinePart(75), MachinePart(75, gone=True)], "lost"),  # asked for by the platform
        ([MachinePart(None), MachinePart(None, gone=True)], "lost"),
        ([MachinePart(None), MachinePart(71)], "crash"),
        ([MachinePart(75), MachinePart(None)], "stopped"),
    ],
)
def test_an_attempt_ends_as_its_parts_say(parts: list[MachinePart], end: str):
    assert node.outcome(dict(enumerate(parts))) == end


def attempts(account: Account, *ends: str, crashes: int = 10) -> list[tuple[bool, int]]:
    """Whether the job goes on and its status after each attempt, none of which leaves a checkpoint."""
    told = []
    for end in ends:
        account.begin(max_crashes=crashes, unfinished="lost")
        decision = account.end(warned=True, max_crashes=crashes, end=end)  # type: ignore[arg-type]
        told.append((decision.again, decision.status))
        assert ("a machine was lost" in decision.reason) == (end == "lost")
    return told


def test_lost_machines_never_end_a_job_and_crashes_do(tmp_path: Path):
    assert attempts(Account(tmp_path / "lost", "j"), *["lost"] * 5) == [(True, 1)] * 5
    assert attempts(Account(tmp_path / "one", "j"), "lost", "crash") == [(True, 1), (True, 1)]
    assert attempts(Account(tmp_path / "mixed", "j"), "crash", "lost", "crash")[1:] == [(True, 1), (False, 1)]
    assert attempts(Account(tmp_path / "mistake", "j"), "lost", "mistake") == [(True, 1), (False, 2)]


def test_machine_0_that_is_replaced_finds_its_own_attempt_unfinished(tmp_path: Path):
    account = Account(tmp_path, "j")
    for _ in range(3):
        assert account.begin(max_crashes=1, unfinished="lost") is None
    assert account.decided(max_crashes=1) is None  # one is open
    written = json.loads((tmp_path / "jobs" / "j.json").read_text())
    assert [each["end"] for each in written["attempts"]] == ["lost", "lost"]


@pytest.mark.parametrize(("end", "status"), [("mistake", 2), ("finished", 0), ("lost", None)])
def test_a_container_that_is_started_again_after_the_decision_ends_at_once(
    end: str, status: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Vertex AI starts a replica again whatever its status; torchrun is not reached."""
    attempts(Account(tmp_path, "4711"), end)
    monkeypatch.setenv("CLOUD_ML_JOB_ID", "4711")
    monkeypatch.delenv(node.JOB, raising=False)

    def reached(*_: object, **__: object) -> None:
        raise UserWarning

    monkeypatch.setattr(node, "MeetingHost", reached)
    monkeypatch.setattr(node, "Children", object)  # they would be pytest's
    argv = ["--gpus-per-node", "1", "--", "--run-dir", str(tmp_path), "--recipe", "demo"]
    if status is None:
        with pytest.raises(UserWarning):
            node.main(argv)
    else:
        assert node.main(argv) == status


def test_a_mistake_in_the_flags_ends_with_2_in_one_line(capsys: pytest.CaptureFixture[str]):
    assert node.main(["--gpus-per-node", "2", "--", "--tp", "3"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "--seq-length 64 is not divisible by --tensor-model-parallel-size 3" in line
