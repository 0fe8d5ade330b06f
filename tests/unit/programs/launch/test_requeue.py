"""A job is started again exactly where another attempt can do better than the last ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megavlm.checkpoint.manifest import write_manifest
from megavlm.programs.launch.attempt import Attempt, decide, main
from megavlm.programs.launch.job import note_exit
from megavlm.resilience.events import record

FINISHED = Attempt("finished", 8, 12)
MISTAKE = Attempt("mistake", 0, 0)
BAD = Attempt("bad numbers", 4, 8)
WARNED = Attempt("stopped", 4, 8, warned=True)
IDLE = Attempt("stopped", 8, 8, warned=True)
ASKED = Attempt("stopped", 4, 8)
CRASH = Attempt("crash", 4, 8)
LOSS = Attempt("crash", 8, 8)  # nothing new was saved


@pytest.mark.parametrize(
    ("attempts", "again", "status"),
    [
        ([FINISHED], False, 0),
        ([CRASH, FINISHED], False, 0),
        ([MISTAKE], False, 2),
        ([CRASH, MISTAKE], False, 2),
        ([BAD], False, 3),
        ([WARNED], True, 75),
        ([WARNED] * 50, True, 75),
        ([ASKED], False, 75),
        ([CRASH], True, 1),
        ([LOSS], True, 1),
        ([LOSS, LOSS], False, 1),
        ([CRASH, LOSS], True, 1),
        ([LOSS, CRASH, LOSS], True, 1),
        ([CRASH] * 3, True, 1),
        ([CRASH] * 4, False, 1),
        ([CRASH, WARNED] * 3, True, 75),
        ([CRASH, WARNED] * 3 + [CRASH], False, 1),
        ([IDLE], True, 75),
        ([IDLE, IDLE], False, 75),
        ([LOSS, IDLE], False, 75),
        ([Attempt("crash", 8, 4), Attempt("crash", 4, 4)], False, 1),  # a damaged checkpoint was set aside
    ],
)
def test_a_job_is_started_again_where_that_can_help(attempts: list[Attempt], again: bool, status: int):
    decision = decide(attempts, max_crashes=3)
    assert (decision.again, decision.status) == (again, status), decision.reason


def test_the_first_rank_to_end_says_how(tmp_path: Path):
    environment = {"MEGAVLM_EXIT_FILE": str(tmp_path / "exit")}
    for status in (2, 75, 0):
        note_exit(status, environment)
    assert (tmp_path / "exit").read_text() == "2"
    note_exit(2, {})


class Job:
    """A job whose attempts the test describes and does not run."""

    def __init__(self, run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.run_dir, self.capsys = run_dir, capsys

    def call(self, when: str, *options: str, flags: str = "--tp 2") -> tuple[int, str]:
        argv = [when, "--job", "7", "--world", "2", "--max-crashes", "3", *options, "--", *flags.split()]
        status = main([*argv, "--run-dir", str(self.run_dir)])
        return status, self.capsys.readouterr().out.strip()

    def attempt(self, status: int | None, *options: str, saves: int | None = None) -> tuple[int, str]:
        began = self.call("begin")
        if began[0]:
            return began
        if saves is not None:
            folder = self.run_dir / "checkpoints" / f"iter_{saves:07d}"
            folder.mkdir(parents=True)
            (folder / "megavlm.json").write_text("{}")
            write_manifest(folder, {})
        if status is not None:
            note_exit(status, {"MEGAVLM_EXIT_FILE": began[1]})
        return self.call("end", *options)


def test_a_job_is_followed_over_its_attempts(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    job = Job(tmp_path / "run", capsys)
    assert job.attempt(75, "--warned", saves=4) == (0, "again")
    assert job.attempt(None) == (0, "again")
    assert job.attempt(None, saves=8) == (0, "again")
    assert job.attempt(0, saves=12) == (0, "")
    (file,) = (tmp_path / "run" / "jobs").glob("*.json")
    ends = [each["end"] for each in json.loads(file.read_text())["attempts"]]
    assert ends == ["stopped", "crash", "crash", "finished"]


def test_a_machine_that_computes_wrongly_is_named_for_the_next_attempt(tmp_path: Path, capsys):
    job = Job(tmp_path / "run", capsys)
    job.run_dir.mkdir()
    record(job.run_dir, "mismatch", hosts=["node7.cluster.local", "node9"])
    assert job.attempt(1, saves=4) == (0, "again")  # a crash of another kind
    assert job.attempt(71, saves=8) == (0, "again node7,node9")


def test_attempts_that_the_script_did_not_survive_count(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """A lost node ends the script; the scheduler starts the job again by itself."""
    job = Job(tmp_path / "run", capsys)
    assert [job.call("begin")[0] for _ in range(3)] == [0, 0, 1]


@pytest.mark.parametrize("flags", ["--tp 4", "--no-such-flag", "--tp 2 --lr fast"])
def test_a_job_that_cannot_run_ends_before_it_begins(flags: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    job = Job(tmp_path / "run", capsys)
    assert job.call("begin", flags=flags) == (2, "")
    assert not (tmp_path / "run").exists()
