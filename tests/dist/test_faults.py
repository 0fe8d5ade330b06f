"""Faults of docs/faults.md that no other module provokes; `tests/unit/faults.txt` names the tests of each row."""

from __future__ import annotations

import io
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

from megavlm.checkpoint import folders
from megavlm.errors import Stopped, UserError
from megavlm.resilience.events import STOPPED, read_status
from tests.support.covering import slow
from tests.support.pool import Pools
from tests.support.torchrun import TINY, Launched, last_iteration
from tests.support.training import SHALLOW, asking_to_stop, train

RUN = [*SHALLOW, *"--save-interval 2 --keep-checkpoints 0 --train-iters 4".split()]


def without_checkpoints(run_dir: Path) -> None:
    """Remove the checkpoints once the first is there."""
    end = time.monotonic() + 60
    while not folders.complete(run_dir / "checkpoints") and time.monotonic() < end:
        time.sleep(0.01)
    (run_dir / "checkpoints").rename(run_dir / "gone")  # at once, for the writer removes files of its own


def with_a_file(run_dir: Path) -> None:
    without_checkpoints(run_dir)
    (run_dir / "checkpoints").touch()


def renamed(run_dir: Path) -> None:
    run_dir.rename(run_dir.with_name("moved"))
    time.sleep(1)  # for the lock to see it


def disturbed(argv: list[str], run_dir: str, step: int, how: str) -> tuple[str, str]:
    """Train, and disturb the run after a step: by a function of this module, or by a request to stop.

    Return the kind of what ends the run, and its text.
    """
    from megavlm.resilience import lock, signals
    from megavlm.train.engine import Engine

    train_step, steps = Engine.train_step, []

    def end(status: int, _: str) -> None:
        raise SystemExit(status, len(folders.complete(Path(run_dir) / "store")))

    with (
        asking_to_stop() as ask,
        patch.object(lock, "_BEAT", 0.05),
        patch.object(signals, "_end", end),
    ):

        def stepping(self: Engine, *args: Any, **kwargs: Any) -> Any:
            result = train_step(self, *args, **kwargs)
            steps.append(result)
            if len(steps) == step:
                ask() if how == "asked" else globals()[how](Path(run_dir))
            return result

        with patch.object(Engine, "train_step", stepping):
            try:
                train(argv, run_dir)
            except (SystemExit, Stopped, UserError) as error:
                return type(error).__name__, str(error)
    return "", ""


def test_a_request_in_the_last_step_ends_a_finished_run(pools: Pools, tmp_path: Path) -> None:
    argv = [*RUN, "--checkpoint-dir", f"file://{tmp_path}/store"]  # whose copies are part of all that is saved
    assert pools(1).run(disturbed, argv, str(tmp_path), 4, "asked") == [("SystemExit", str((STOPPED, 2)))]
    assert read_status(tmp_path)["state"] == "finished"
    assert [iteration for iteration, _ in folders.complete(tmp_path / "checkpoints")] == [2, 4]


def test_checkpoints_that_are_removed_are_made_again(pools: Pools, tmp_path: Path) -> None:
    assert pools(1).run(disturbed, RUN, str(tmp_path), 3, "without_checkpoints") == [("", "")]
    assert [iteration for iteration, _ in folders.complete(tmp_path / "checkpoints")] == [4]


def test_a_file_in_the_place_of_checkpoints_ends_the_run_in_one_line(pools: Pools, tmp_path: Path) -> None:
    ((kind, line),) = pools(1).run(disturbed, RUN, str(tmp_path), 3, "with_a_file")
    assert (kind, "Not a directory" in line, "\n" in line) == ("UserError", True, False), line


def test_a_run_whose_folder_is_renamed_saves_to_the_old_place(pools: Pools, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    ((kind, line),) = pools(1).run(disturbed, [*RUN, "--save-interval", "0"], str(run_dir), 2, "renamed")
    assert (kind, "lock is gone: the folder was removed or renamed" in line) == ("Stopped", True), line
    assert [iteration for iteration, _ in folders.complete(run_dir / "checkpoints")] == [3]
    assert (tmp_path / "moved/lock").exists()


def given_up(argv: list[str], run_dir: str) -> tuple[str, str]:
    """Train after the process that copies checkpoints has given up; return the output, and the error for the user."""
    from megavlm.train.uploads import Uploads

    process = SimpleNamespace(poll=lambda: 1, wait=lambda _: 1, stdin=io.StringIO())
    printed = io.StringIO()
    with patch.object(Uploads, "_start", lambda _: process), pytest.raises(UserError) as raised:
        train(argv, run_dir, printed=printed)
    return printed.getvalue(), str(raised.value)


def test_a_store_that_is_lost_keeps_no_run_from_its_checkpoint(pools: Pools, tmp_path: Path) -> None:
    """It goes on with a warning, and says at its end that copies are missing."""
    pools(1).run(train, RUN, str(tmp_path / "run"))
    (tmp_path / "file").touch()
    argv = [*RUN, "--train-iters", "5", "--checkpoint-dir", f"file://{tmp_path}/file/below"]
    ((printed, error),) = pools(1).run(given_up, argv, str(tmp_path / "run"))
    (warning,) = [line for line in printed.splitlines() if line.startswith("warning: --checkpoint-dir")]
    assert "rights to write there" in warning
    assert "not all checkpoints are copied to --checkpoint-dir" in error
    assert "the same command copies the rest" in error
    assert [iteration for iteration, _ in folders.complete(tmp_path / "run/checkpoints")] == [2, 4, 5]


MOMENTS: dict[str, Callable[[Path], bool]] = {
    "start": lambda run_dir: (run_dir / "config.yaml").exists(),
    "step": lambda run_dir: last_iteration(run_dir) > 2,
    "save": lambda run_dir: bool([*run_dir.glob("checkpoints/tmp-*")]),
}


@pytest.mark.parametrize("moment", [slow(moment) for moment in MOMENTS])
def test_ranks_end_with_one_that_is_killed(moment: str, tmp_path: Path) -> None:
    """By themselves, for torchrun would wait for minutes."""
    flags = "--tp 2 --train-iters 100000 --log-interval 50 --save-interval".split()
    launcher = "--standalone --nproc-per-node 2 --shutdown-timeout 600".split()
    with Launched([*TINY, *flags, "1" if moment == "save" else "0"], tmp_path, launcher=launcher) as run:
        run.wait_for(lambda: MOMENTS[moment](tmp_path))
        run.send(signal.SIGKILL, run.ranks()[1])
        began = time.monotonic()
        assert run.status() == 1
        assert time.monotonic() - began < 60, run.output()
        assert not run.alive()
    status = read_status(tmp_path)
    assert moment == "start" or (status["state"], status["exit_status"]) == ("failed", 1), run.output()
