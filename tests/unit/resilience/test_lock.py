"""A run folder has one writer: a living one is named, a dead one is replaced."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import pytest

from megavlm.errors import UserError
from megavlm.resilience import lock
from megavlm.resilience.events import events
from megavlm.resilience.lock import RunLock

CONTEXT = multiprocessing.get_context("fork")


def hold(run_dir: Path, ready, *, beat: float) -> None:
    with patch.object(lock, "_BEAT", beat):
        RunLock(run_dir).acquire()
        ready.set()
        signal.pause()


@pytest.fixture
def owner(tmp_path: Path):
    """A process that holds the lock of `tmp_path`."""
    ready = CONTEXT.Event()
    process = CONTEXT.Process(target=hold, args=(tmp_path, ready), kwargs={"beat": 0.05})
    process.start()
    assert ready.wait(60)
    yield process
    process.kill()
    process.join()


def test_a_living_run_keeps_its_folder(owner, tmp_path: Path):
    with pytest.raises(UserError, match=rf"process {owner.pid} on .*--run-dir"):
        RunLock(tmp_path).acquire()


def test_a_dead_run_is_replaced(owner, tmp_path: Path):
    owner.kill()
    owner.join()
    mine = RunLock(tmp_path)
    mine.acquire()
    assert json.loads((tmp_path / "lock").read_text())["pid"] == os.getpid()
    assert [event["kind"] for event in events(tmp_path)] == ["takeover"]
    mine.release()
    RunLock(tmp_path).acquire()  # nothing to take over after a release
    assert len(events(tmp_path)) == 1


def test_the_kernel_still_holds_what_was_looked_at(owner, tmp_path: Path, monkeypatch):
    """Closing any descriptor of a file drops the process's locks on it, and reading a heartbeat closes one. The lock
    must survive that, also after a takeover."""
    owner.kill()
    owner.join()
    monkeypatch.setattr(lock, "_boot", lambda: "another machine")
    monkeypatch.setattr(lock, "_SILENCE", 0.2)
    mine = RunLock(tmp_path)
    mine.acquire()
    asked = CONTEXT.Process(target=expect_refusal, args=(tmp_path,))
    asked.start()
    asked.join()
    assert asked.exitcode == 0
    mine.release()


def expect_refusal(run_dir: Path) -> None:
    with pytest.raises(UserError):
        RunLock(run_dir).acquire()


@pytest.mark.parametrize("alive", [True, False])
def test_without_the_kernels_lock_a_heartbeat_is_looked_for(owner, tmp_path, monkeypatch, alive):
    """As on shared storage that does not pass locks on."""
    monkeypatch.setattr(lock, "_lock", lambda _: False)
    monkeypatch.setattr(lock, "_SILENCE", 2.0)
    mine = RunLock(tmp_path)
    if alive:
        with pytest.raises(UserError, match=str(owner.pid)):
            mine.acquire()
        return
    owner.kill()
    owner.join()
    mine.acquire()
    mine.release()


@pytest.mark.parametrize("content", ["", "{", "[]", '{"pid": "\\ud800", "machine": 3}', "[" * 100_000])
def test_a_lock_that_says_nothing_is_nobodys(tmp_path: Path, content: str):
    (tmp_path / "lock").write_text(content)
    with patch.object(lock, "_SILENCE", 0.1):
        RunLock(tmp_path).acquire()


def test_a_folder_that_cannot_be_written(tmp_path: Path):
    with pytest.raises(UserError, match="--run-dir"):
        RunLock(tmp_path / "missing").acquire()


@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir, lambda path: path.symlink_to(path.with_name("other"))])
def test_a_lock_that_is_no_file_is_refused(tmp_path: Path, make: Callable[[Path], object]):
    (tmp_path / "other").write_text("kept")
    make(tmp_path / "lock")
    with pytest.raises(
        UserError, match=r"--run-dir: \S*/lock cannot be written .*: move it away, or name another folder"
    ):
        RunLock(tmp_path).acquire()
    assert (tmp_path / "other").read_text() == "kept"


def beat(run_dir: Path, told, damage: Callable[[Path], object]) -> None:
    """Lock a folder, change it as the test asks, and send what the lock reports, "" if nothing within a second."""
    with patch.object(lock, "_BEAT", 0.02):
        mine = RunLock(run_dir)
        mine.acquire()
        mine.when_lost(told.send)
        damage(run_dir)
        time.sleep(1)
        told.send("")
        mine.release()


def of_another_machine(run_dir: Path) -> None:
    owner = json.loads((run_dir / "lock").read_text())
    file = os.open(run_dir / "lock", os.O_WRONLY)
    lock._write(file, {**owner, "machine": "another", "host": "other", "pid": 77})


def rename(run_dir: Path) -> None:
    run_dir.rename(run_dir.with_name("moved"))


def replace(run_dir: Path) -> None:
    """By another run."""
    (run_dir.with_name("new")).mkdir()
    (run_dir.with_name("new") / "lock").write_text(json.dumps({"host": "other", "pid": 77}))
    run_dir.rename(run_dir.with_name("moved"))
    run_dir.with_name("new").rename(run_dir)


@pytest.mark.parametrize(
    ("damage", "status", "said"),
    [(of_another_machine, 1, None), (rename, 0, "lock is gone"), (replace, 1, None), (Path.iterdir, 0, "")],
)
def test_an_owner_notices_that_it_no_longer_owns_its_folder(tmp_path, damage, status, said):
    """A run that was suspended while another machine's run took its folder over must not write there again."""
    (tmp_path / "run").mkdir()
    told, heard = CONTEXT.Pipe()
    process = CONTEXT.Process(target=beat, args=(tmp_path / "run", heard, damage))
    process.start()
    heard.close()
    process.join(60)
    assert process.exitcode == status
    if said is not None:
        heard_of = told.recv()
        assert said in heard_of if said else not heard_of
