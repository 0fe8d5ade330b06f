"""Data workers that are killed, stopped or stuck are replaced; nothing of their work is lost or done wrong."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from megavlm.command_line.parsing import parse
from megavlm.data import workers
from megavlm.data.file_source import FilesSource
from megavlm.data.workers import WorkerPool, _WorkerLost
from megavlm.errors import UserError
from tests.support.data_files import sources_of, write_all
from tests.support.training import SMALL

TASKS = [range(start, start + 4) for start in range(0, 32, 4)]


def tokens(source: FilesSource, sample: int) -> list[list[int]]:
    return [encoded.tokens.tolist() for encoded in source.encode(sample).samples]


def encode(source: FilesSource, samples: Sequence[int]) -> list[list[list[int]]]:
    return [tokens(source, sample) for sample in samples]


def trip(source: FilesSource, task: tuple[Path, str, Sequence[int]]) -> list[list[list[int]]]:
    """Encode, but die or hang at the third sample: the first time, or each time."""
    marker, how, samples = task
    found = []
    for number, sample in enumerate(samples):
        found.append(tokens(source, sample))
        if number == 2 and (how.startswith("always") or not marker.exists()):
            marker.touch()
            if how.endswith("dies"):
                os.kill(os.getpid(), signal.SIGSEGV)
            os.kill(os.getpid(), signal.SIGSTOP)
    return found


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> FilesSource:
    folder = write_all(tmp_path_factory.mktemp("data"), samples=40)
    return FilesSource(parse([*SMALL, *sources_of(folder), "--seq-length", "96"]))


@pytest.mark.parametrize("how", ["dies", pytest.param("hangs", marks=pytest.mark.slow)])
def test_a_worker_that_is_lost_in_a_task_is_replaced(source: FilesSource, tmp_path: Path, how: str) -> None:
    lines: list[str] = []
    pool = WorkerPool(source, 2, timeout=20, report=lines.append)
    pool.map(encode, [range(1), range(1)])  # both have started
    pool._timeout = 2.0 if how == "hangs" else 0.0
    tasks = [(tmp_path / f"{number}", how, task) for number, task in enumerate(TASKS[:2])]
    assert pool.map(trip, tasks) == [encode(source, task) for task in TASKS[:2]]
    pool.close()
    assert len(lines) == 2
    assert all(source.label(task[2])[1] in "".join(lines) for task in TASKS[:2]), lines
    assert all(("SIGSEGV" if how == "dies" else "hung") in line for line in lines), lines


def test_idle_workers_that_are_killed_are_replaced(source: FilesSource) -> None:
    pool = WorkerPool(source, 1, timeout=300)
    expected = pool.map(encode, TASKS)
    for worker in pool._workers:
        worker.kill()
    assert pool.map(encode, TASKS) == expected
    pool.close()


def test_a_sample_that_no_worker_survives_is_named(source: FilesSource, tmp_path: Path) -> None:
    lines: list[str] = []
    pool = WorkerPool(source, 1, timeout=300, report=lines.append)
    told = rf"{source.label(6)[1]}, as 2 before it: repair or remove that sample; .*--num-workers"
    with pytest.raises(UserError, match=told):
        pool.map(trip, [(tmp_path / "0", "always dies", TASKS[1])])
    assert len(lines) == 2
    assert pool.map(encode, TASKS[:1]) == [encode(source, TASKS[0])]  # the pool goes on
    pool.close()


def test_errors_of_a_task_are_raised_where_it_was_given(
    source: FilesSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where data have modules of Python beside them: a worker would import them before it has a path. And where
    the script that was started trains when it is imported.
    """
    (tmp_path / "pickle.py").write_text("raise SystemExit(3)")
    monkeypatch.chdir(tmp_path)
    script = sys.modules["__main__"]
    monkeypatch.setattr(script, "__spec__", None)
    monkeypatch.setattr(script, "__file__", str(tmp_path / "pickle.py"), raising=False)
    pool = WorkerPool(source, 1, timeout=300)
    with pytest.raises(TypeError):
        pool.map(encode, [3])
    with pytest.raises(UserError, match=r"^--num-workers: .*No space left on device \(28\): give /dev/shm more room"):
        pool.map(too_large, [0])
    pool.close()
    assert script.__file__ == str(tmp_path / "pickle.py")


class TooLarge:
    """Fits into no /dev/shm, as torch says it when a tensor is sent."""

    def __reduce__(self) -> tuple[Any, ...]:
        raise RuntimeError("unable to allocate shared memory(shm) for file </torch_1>: No space left on device (28)")


def too_large(source: FilesSource, task: int) -> TooLarge:
    return TooLarge()


@pytest.mark.parametrize("fate", ["hung (--data-worker-timeout)", "ended with exit status 3"])
def test_workers_that_cannot_begin_end_the_run(source: FilesSource, monkeypatch: pytest.MonkeyPatch, fate: str) -> None:
    def lost(worker: Any, function: Any, task: Any) -> None:
        worker.lost = True
        raise _WorkerLost(fate)

    monkeypatch.setattr(workers._Worker, "call", lost)
    pool = WorkerPool(source, 1, timeout=0)
    told = r"before it began a sample, as 2 before it: --num-workers 0 reads without them; .*storage"
    with pytest.raises(UserError, match=told):
        pool.map(encode, TASKS[:1])
    pool.close()


def test_close_waits_for_no_worker(source: FilesSource) -> None:
    """Not for one that hangs, with a time-out that never comes."""
    pool = WorkerPool(source, 1, timeout=0)
    pool.map(encode, TASKS[:1])
    os.kill(pool._workers[0]._process.pid, signal.SIGSTOP)
    future = pool._threads.submit(pool._call, encode, TASKS[0])
    time.sleep(0.2)
    pool.close()
    assert future.exception() is not None
