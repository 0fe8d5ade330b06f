"""Data workers that are killed, stopped or stuck are replaced; nothing of their work is lost or done wrong."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from megavlm.command_line.parsing import parse
from megavlm.data import workers
from megavlm.data.files import FilesSource
from megavlm.data.types import EncodedRecord, Sample, Segment
from megavlm.data.workers import ENCODE, LOAD, TellingSource, Told, WorkerPool, _work, _WorkerLost
from megavlm.errors import UserError
from megavlm.inputs.bad_sample import BadSample, Reason, Skipped
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
    pool = WorkerPool(source, 2, timeout=20, report=lambda line, given_up: lines.append(line))
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


@pytest.mark.slow
def test_a_worker_that_starts_after_the_run_has_ended_says_nothing() -> None:
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    worker = context.Process(target=_work, args=(None, theirs))
    ours.close()
    worker.start()
    worker.join()
    assert worker.exitcode == 0


def test_a_sample_that_no_worker_survives_is_named(source: FilesSource, tmp_path: Path) -> None:
    pool = WorkerPool(source, 1, timeout=300)
    with pytest.raises(UserError) as raised:
        pool.map(trip, [(tmp_path / "0", "always dies", TASKS[1])])
    assert source.label(6)[1] in str(raised.value)
    assert "--num-workers" in str(raised.value)
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


def test_a_worker_that_starts_while_its_pool_is_closed_is_killed(
    source: FilesSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = WorkerPool(source, 1, timeout=0)
    (worker,) = pool._workers
    worker.kill()

    @contextlib.contextmanager
    def closing() -> Iterator[None]:
        pool._closed.set()
        worker.kill()
        yield

    monkeypatch.setattr(workers, "_alone", closing)
    with pytest.raises(_WorkerLost, match="SIGKILL"):
        pool.map(encode, TASKS[:1])
    pool.close()


class Slow:
    """A source of which some samples take too long."""

    def name(self, sample_id: int) -> tuple[str, str]:
        return "set", f"line {sample_id}"

    def skipped(self, sample_id: int, error: BadSample) -> Skipped:
        return Skipped(self.name(sample_id)[1], "set", error.reason, error.detail)

    def encode(self, sample_id: int) -> EncodedRecord:
        return EncodedRecord((), sample_id=sample_id)

    def load(self, segment: Segment) -> Sample:
        return Sample(np.array([segment.sample_id]), np.array([True]))


class FakeWorker:
    """A worker without a process: `fate` says how it is lost at a sample, if it is."""

    fate: ClassVar[Callable[[Told | None], str | None]]
    started = 0

    def __init__(self, source: Any) -> None:
        self._source = source
        self.start()

    def start(self) -> None:
        type(self).started += 1
        self.lost = self.hangs = False
        self.ready = True
        self.sample: Told | None = None

    def call(self, function: Callable[[Any, Any], Any], task: Any, given_up: Any) -> Any:
        self._begin(None)
        telling = TellingSource(self._source, self._begin)
        telling.given_up = given_up
        return function(telling, task)

    def _begin(self, told: Told | None) -> None:
        self.sample = told
        if (fate := type(self).fate(told)) is not None:
            self.lost, self.hangs, self.ready = True, fate == "hung", fate != "ended at once"
            raise _WorkerLost(fate)

    def silence(self) -> float:
        return 0.0

    def kill(self) -> None: ...


class Fakes:
    """Makes pools of fake workers, and keeps what they report."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(workers, "_Worker", FakeWorker)
        self.lines: list[str] = []
        self.given_up: list[Told] = []

    def pool(self, fate: Callable[[Told | None], str | None]) -> WorkerPool:
        FakeWorker.fate, FakeWorker.started = staticmethod(fate), 0  # type: ignore[assignment]
        return WorkerPool(Slow(), 1, timeout=1, given_up=self.given_up, report=self._report)  # type: ignore[arg-type]

    def _report(self, line: str, given_up: Told | None) -> None:
        self.lines.append(line)
        if given_up is not None:
            self.given_up.append(given_up)


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> Fakes:
    return Fakes(monkeypatch)


@pytest.mark.parametrize("part", [ENCODE, LOAD])
def test_the_third_hang_at_a_sample_skips_it_for_good(fakes: Fakes, part: str) -> None:
    """It is skipped where it hung, and only there: what is too slow to load is encoded, and sequences stay."""

    def both(source: Any, samples: Sequence[int]) -> list[Any]:
        found = []
        for sample in samples:
            found.append([each.reason for each in source.encode(sample).skipped])
            try:
                source.load(Segment(sample))
            except BadSample as error:
                found[-1].append(error.reason)
        return found

    slow = (part, "set", "line 6")
    expected = [[], [], [Reason.TOO_SLOW], []]
    for start in (4, 1):  # a second run knows
        pool = fakes.pool(lambda told: "hung" if told == slow else None)
        assert pool.map(both, [TASKS[1]]) == [expected]
        assert FakeWorker.started == start
        pool.close()
    assert fakes.given_up == [slow]
    assert ["line 6" in line for line in fakes.lines] == [True] * 3
    assert "is skipped" in fakes.lines[-1]


@pytest.mark.parametrize(
    ("fate", "told", "started"),
    [
        (lambda told: "hung" if told else None, r"line 6, as 2 before it: .*storage", 9),  # every sample
        (lambda told: "hung" if told is None else None, r"before it began a sample, as 2 before it: if memory", 3),
        (lambda told: "died" if told and told[2] == "line 6" else None, r"line 6, as 2 .*--num-workers", 3),
        (lambda told: "ended at once", r"no data worker can start: 3 were lost .*--num-workers 0", 3),
    ],
    ids=["storage", "before a sample", "dies", "cannot start"],
)
def test_what_cannot_be_skipped_ends_the_run(fakes: Fakes, fate: Any, told: str, started: int) -> None:
    pool = fakes.pool(fate)
    with pytest.raises(UserError, match=told):
        pool.map(encode_all, TASKS[1:2])  # of several, the next may begin before this thread sees the error
    pool.close()
    assert FakeWorker.started == started


def encode_all(source: Any, samples: Sequence[int]) -> list[EncodedRecord]:
    return [source.encode(sample) for sample in samples]


def test_close_waits_for_no_worker(source: FilesSource) -> None:
    """Not for one that hangs, with a time-out that never comes."""
    pool = WorkerPool(source, 1, timeout=0)
    pool.map(encode, TASKS[:1])
    os.kill(pool._workers[0]._process.pid, signal.SIGSTOP)
    future = pool._threads.submit(pool._call, encode, TASKS[0])
    time.sleep(0.2)
    pool.close()
    assert future.exception() is not None
