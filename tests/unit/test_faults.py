"""Faults of docs/faults.md that one process shows; `tests/unit/faults.txt` names the tests of each row."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megavlm.checkpoint import manifest, uploader
from megavlm.errors import UserError
from megavlm.resilience.events import read_status, write_status
from megavlm.resilience.signals import listen
from megavlm.train.run_dir import make_run_dir
from tests.support.manifests import committed

CONTEXT = multiprocessing.get_context("fork")


def rank(ready: Any, number: signal.Signals) -> None:
    signal.signal(number, signal.SIG_DFL)  # what a shell starts by `&` ignores SIGQUIT
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    listen(parent=None).training()
    ready.set()
    time.sleep(60)


@pytest.mark.parametrize("number", [signal.SIGQUIT, signal.SIGALRM, signal.SIGXCPU])
def test_a_signal_that_is_no_request_ends_at_once(number: signal.Signals) -> None:
    ready = CONTEXT.Event()
    process = CONTEXT.Process(target=rank, args=(ready, number))
    process.start()
    assert ready.wait(60)
    os.kill(process.pid or 0, number)
    process.join(30)
    assert process.exitcode == -number
    process.kill()


def test_a_status_that_cannot_be_written_ends_nothing(tmp_path: Path) -> None:
    (tmp_path / "status.json").mkdir()
    write_status(tmp_path, "running", iteration=3)
    assert read_status(tmp_path) == {}


def test_a_disk_that_is_full_at_the_start_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "mkdir", full)
    with pytest.raises(
        UserError, match=r"^--run-dir \S+ cannot be written \(No space left on device\): choose another"
    ):
        make_run_dir(tmp_path / "run")


IN_PLACE: dict[str, Callable[[Path], object]] = {
    "folder": Path.mkdir,
    "FIFO": os.mkfifo,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "link to itself": lambda path: path.symlink_to(path),
}


@pytest.mark.parametrize("name", ["state.json", "__0_0.distcp", manifest.MANIFEST])
@pytest.mark.parametrize("what", IN_PLACE)
def test_what_is_in_the_place_of_a_file_is_damage(what: str, name: str, tmp_path: Path) -> None:
    folder = committed(tmp_path, 1, {"state.json": "{}", "__0_0.distcp": "x", "megavlm.json": "{}"})
    assert manifest.first_look(folder) is None
    (folder / name).unlink()
    IN_PLACE[what](folder / name)
    assert name in str(manifest.first_look(folder))


def test_a_link_to_the_same_content_is_none(tmp_path: Path) -> None:
    folder = committed(tmp_path, 1, {"state.json": "{}", "megavlm.json": "{}"})
    (folder / "state.json").rename(tmp_path / "moved")
    (folder / "state.json").symlink_to(tmp_path / "moved")
    assert manifest.first_look(folder) is None


def test_a_store_that_does_not_answer_is_given_up(tmp_path: Path) -> None:
    committed(tmp_path / "run/checkpoints", 1, {"megavlm.json": "{}"})
    (tmp_path / "file").touch()
    job = {"run_dir": str(tmp_path / "run"), "store": f"file://{tmp_path}/file/below", "keep": {"newest": 0}}
    code = "from megavlm.checkpoint import uploader; uploader.GIVE_UP = 0.0; uploader.main()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        process.stdin.write(f"{json.dumps({**job, 'parent': os.getpid()})}\n{uploader.FINISH}")
        process.stdin.flush()
        assert process.wait(60) == 1
