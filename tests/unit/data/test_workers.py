"""Data workers that are killed, stopped or stuck are replaced; nothing of their work is lost or done wrong."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megavlm.command_line.parsing import parse
from megavlm.data import workers
from megavlm.data.file_source import FilesSource
from megavlm.data.types import CollatedBatch
from megavlm.data.workers import WorkerPool, _WorkerLost
from megavlm.errors import UserError
from tests.support.data_files import sources_of, write_all
from tests.support.micro_batch import micro_batch
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


@pytest.fixture
def pool_of(source: FilesSource) -> Iterator[Any]:
    """Make pools that are closed whatever a test finds: workers that are left would keep pytest from ending."""
    with ExitStack() as opened:
        yield lambda workers, **options: opened.enter_context(closing(WorkerPool(source, workers, **options)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_all(tmp_path_factory.mktemp("data"), samples=40)


@pytest.fixture(scope="module")
def source(folder: Path) -> FilesSource:
    return source_of(folder)


def source_of(folder: Path) -> FilesSource:
    return FilesSource(parse([*SMALL, *sources_of(folder), "--seq-length", "96"]))


@pytest.mark.slow
def test_workers_that_hang_in_tasks_are_replaced(source: FilesSource, pool_of: Any, tmp_path: Path) -> None:
    lines: list[str] = []
    pool = pool_of(2, timeout=20, report=lines.append)
    pool.map(encode, [range(1), range(1)])  # both have started
    pool._timeout = 2.0
    tasks = [(tmp_path / f"{number}", "hangs", task) for number, task in enumerate(TASKS[:2])]
    assert pool.map(trip, tasks) == [encode(source, task) for task in TASKS[:2]]
    assert len(lines) == 2
    assert all(source.label(task[2])[1] in "".join(lines) for task in TASKS[:2]), lines
    assert all("hung" in line for line in lines), lines


def test_whatever_happens_to_a_worker_no_work_is_lost(source, pool_of, tmp_path, monkeypatch):
    """In one pool, because each worker imports for seconds. The first one starts where data have modules of Python
    beside them, which it would import before it has a path, and where the script that was started trains when it is
    imported.
    """
    (tmp_path / "pickle.py").write_text("raise SystemExit(3)")
    script, lines = sys.modules["__main__"], list[str]()
    with monkeypatch.context() as patch:
        patch.chdir(tmp_path)
        patch.setattr(script, "__spec__", None)
        patch.setattr(script, "__file__", str(tmp_path / "pickle.py"), raising=False)
        pool = pool_of(1, timeout=300, report=lines.append)
        with pytest.raises(TypeError):
            pool.map(encode, [3])
        assert script.__file__ == str(tmp_path / "pickle.py")
    expected = [encode(source, task) for task in TASKS]
    assert pool.map(encode, TASKS) == expected
    assert lines == []

    pool._workers[0].kill()  # while it is idle; the next one dies at the third sample
    assert pool.map(trip, [(tmp_path / "0", "dies", TASKS[0])]) == expected[:1]
    assert ["SIGKILL" in lines[0], "SIGSEGV" in lines[1], source.label(2)[1] in lines[1]] == [True] * 3, lines

    monkeypatch.setattr(workers, "ATTEMPTS", 2)
    told = rf"{source.label(6)[1]}, as 1 before it: repair or remove that sample; .*--num-workers"
    with pytest.raises(UserError, match=told):
        pool.map(trip, [(tmp_path / "1", "always dies", TASKS[1])])
    assert pool.map(encode, TASKS[:1]) == expected[:1], "the pool goes on"

    os.kill(pool._workers[0]._process.pid, signal.SIGSTOP)
    future = pool._threads.submit(pool._call, encode, TASKS[0])
    time.sleep(0.2)
    pool.close()  # which waits for no worker; the fixture does so again, as the loader of validation
    assert future.exception() is not None


@pytest.mark.parametrize("fate", ["hung (--data-worker-timeout)", "ended with exit status 3"])
def test_workers_that_cannot_begin_end_the_run(pool_of: Any, monkeypatch: pytest.MonkeyPatch, fate: str) -> None:
    def lost(worker: Any, *_: Any) -> None:
        worker.lost = True
        raise _WorkerLost(fate)

    monkeypatch.setattr(workers._Worker, "call", lost)
    told = r"before it began a sample, as 2 before it: --num-workers 0 reads without them; .*storage"
    with pytest.raises(UserError, match=told):
        pool_of(1, timeout=0).map(encode, TASKS[:1])


def batch(source: FilesSource, seconds: float) -> CollatedBatch:
    time.sleep(seconds)
    return CollatedBatch(replace(micro_batch(1), features=None))


def left_alone(folder: str) -> None:
    """Print the number of a worker, which then works for ten minutes."""
    pool = WorkerPool(source_of(Path(folder)), 1, timeout=0)
    kept = pool.map(batch, [0.0])
    print(pool._workers[0]._process.pid, flush=True)
    pool.map(batch, [600.0])
    del kept


@pytest.mark.slow
def test_nothing_is_left_of_a_run_that_is_killed(folder: Path) -> None:
    code = f"from tests.unit.data.test_workers import left_alone; left_alone({str(folder)!r})"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        worker = Path("/proc") / run.stdout.readline().strip()
        files = [[os.readlink(file) for file in (each / "fd").iterdir()] for each in (worker, Path(f"/proc/{run.pid}"))]
        run.kill()
    assert all("/memfd:megavlm (deleted)" in of_one for of_one in files), files
    assert not [file for of_one in files for file in of_one if "/dev/shm" in file]
    until = time.monotonic() + 60
    while worker.exists() and "Z (zombie)" not in (worker / "status").read_text():
        assert time.monotonic() < until, "the worker goes on"
        time.sleep(0.1)
