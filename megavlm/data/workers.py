"""Run data tasks in worker processes; replace a worker that dies or hangs, and repeat its task.

Tasks have no side effects, so they can be repeated. Each worker has a pipe of its own, and a thread of this process
that waits for it, so that no lock or queue is shared with a process that may be killed at any moment. A worker sends
the name of each sample before it begins it, so that a message can name the sample at which it died or hung.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.multiprocessing  # tensors travel in shared memory

from megavlm.data.types import EncodedRecord, Sample, SampleId, Segment
from megavlm.errors import UserError
from megavlm.resilience.signals import SIGNALS, how_it_ended

if TYPE_CHECKING:
    from megavlm.data.file_source import FilesSource

Result = TypeVar("Result")

ATTEMPTS = 3  # workers that may be lost at one task before the run fails
_ROOM = "give /dev/shm more room (docker run --shm-size=16g), or read without workers (--num-workers 0)"
_START = 300.0  # seconds that a worker may take for its imports, at least
_LOOK = 1.0  # seconds between checks for workers that hang
_STARTING = threading.Lock()
_SCRIPT = {"__file__", "__spec__"}  # by these, a process that Python starts finds the script of its parent


class WorkerPool:
    """Calls `function(source, task)` in worker processes, each of which has a copy of the source."""

    def __init__(
        self,
        source: FilesSource,
        workers: int,
        *,
        timeout: float,
        report: Callable[[str], None] = lambda line: None,
    ) -> None:
        """Start the workers.

        A worker that sends nothing for `timeout` seconds is replaced (0: never). `report` is called with a line about
        each replacement. Raises UserError if processes cannot be started.
        """
        self._source = source
        self._timeout = timeout
        self._report = report
        self._closed = threading.Event()
        try:
            self._workers = [_Worker(source) for _ in range(workers)]  # start now, while the model is built
        except OSError as error:
            raise UserError(
                f"--num-workers {workers}: a process cannot be started ({error.strerror}): lower it, or raise the "
                "limit of processes (ulimit -u)"
            ) from error
        self._idle: SimpleQueue[_Worker] = SimpleQueue()
        for worker in self._workers:
            self._idle.put(worker)
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="worker")
        threading.Thread(target=self._end_hanging, name="worker-timeout", daemon=True).start()

    def map(self, function: Callable[[Any, Any], Result], tasks: Sequence[Any]) -> list[Result]:
        """Return `function(source, task)` of each task, in order.

        Raises UserError, with the name of the sample, if several workers die or hang at one task.
        """
        return list(self._threads.map(self._call, [function] * len(tasks), tasks))

    def close(self) -> None:
        """Kill the workers and drop their tasks."""
        self._closed.set()
        for worker in self._workers:
            worker.kill()
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _call(self, function: Callable[[Any, Any], Result], task: Any) -> Result:
        worker, losses = self._idle.get(), 0
        try:
            while True:
                if worker.lost:
                    worker.start()
                    if self._closed.is_set():  # `close` has killed the one before
                        worker.kill()
                try:
                    result: Result = worker.call(function, task)
                    return result
                except _WorkerLost as lost:
                    if self._closed.is_set():
                        raise
                    losses += 1
                    self._report_loss(worker, lost, last=losses == ATTEMPTS)
        finally:
            self._idle.put(worker)

    def _report_loss(self, worker: _Worker, lost: _WorkerLost, *, last: bool) -> None:
        """Report a worker that was lost; raise UserError if it was the last one of a task."""
        place = "before it began a sample" if worker.sample is None else f"at sample {worker.sample}"
        line = f"a data worker {lost} {place}"
        if not last:
            return self._report(f"{line}: another takes its place")
        remedy = "--num-workers 0 reads without them" if worker.sample is None else "repair or remove that sample"
        raise UserError(
            f"{line}, as {ATTEMPTS - 1} before it: {remedy}; if memory ran out, lower --num-workers or "
            "--max-image-pixels; if storage does not answer, look at it; if it is only slow, raise "
            "--data-worker-timeout"
        ) from lost

    def _end_hanging(self) -> None:
        """Kill workers that sent nothing for too long; the thread that waits for one then finds its pipe closed."""
        while not self._closed.wait(_LOOK):
            for worker in self._workers:
                if self._timeout and worker.silence() > (self._timeout if worker.ready else max(self._timeout, _START)):
                    worker.hangs = True
                    worker.kill()


class _WorkerLost(Exception):
    """Raised if a worker has ended; the message says how."""


class _Worker:
    """Owns a worker process and this process's end of its pipe."""

    def __init__(self, source: FilesSource) -> None:
        self._source = source
        self.start()

    def start(self) -> None:
        """Start the process, in place of one that has ended."""
        # Spawned, not forked: this process has threads of gloo and NCCL, and perhaps a CUDA context.
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        process = context.Process(target=_work, args=(self._source, theirs), daemon=True)
        with _alone():
            process.start()
        self._process = process
        theirs.close()  # so that the pipe ends with the process
        self.sample: str | None = None  # the name of the last one that it began
        self.ready = self.lost = False
        self.hangs = False
        self._heard: float | None = None  # time of its last message; None while it has no task

    def call(self, function: Callable[[Any, Any], Result], task: Any) -> Result:
        """Return `function(source, task)`. Raises _WorkerLost if the process ends, and what the function raises."""
        self.sample = None
        self._heard = time.monotonic()
        try:
            self._pipe.send((function, task))
            while True:
                kind, value = self._pipe.recv()
                self._heard = time.monotonic()
                if kind == "done":
                    result: Result = value
                    return result
                if kind == "error":
                    raise value
                if kind == "ready":
                    self.ready = True
                else:
                    self.sample = value
        except (EOFError, ConnectionError, FileNotFoundError) as error:
            raise _WorkerLost(self._how_it_ended()) from error
        finally:
            self._heard = None

    def silence(self) -> float:
        """Return the seconds since the last message of a worker that has a task; 0 without a task."""
        heard = self._heard
        return 0.0 if heard is None else time.monotonic() - heard

    def kill(self) -> None:
        self._process.kill()

    def _how_it_ended(self) -> str:
        self._process.kill()
        ended = how_it_ended(self._process)
        self._pipe.close()
        self.lost = True
        return "hung (--data-worker-timeout)" if self.hangs else ended


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Let processes that Python starts meanwhile look for modules where this one does, and never in the working
    directory, which may have a `pickle.py` beside the data; and not run the script that was started once more, as they
    otherwise do: one without `if __name__ == "__main__"` would start a run in each.
    """
    main = sys.modules["__main__"]
    with _STARTING:
        before = os.environ.get("PYTHONSAFEPATH")
        named = {name: vars(main)[name] for name in _SCRIPT & vars(main).keys()}
        os.environ["PYTHONSAFEPATH"] = "1"
        vars(main).update(dict.fromkeys(named))
        try:
            yield
        finally:
            vars(main).update(named)
            if before is None:
                del os.environ["PYTHONSAFEPATH"]
            else:
                os.environ["PYTHONSAFEPATH"] = before


class TellingSource:
    """Wraps a source: calls `tell` with the name of each sample before it is read."""

    def __init__(self, source: FilesSource, tell: Callable[[str], None]) -> None:
        self._source = source
        self._tell = tell

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def encode(self, sample_id: SampleId) -> EncodedRecord:
        self._tell(self._source.name(sample_id)[1])
        return self._source.encode(sample_id)

    def load(self, segment: Segment) -> Sample:
        self._tell(self._source.name(segment.sample_id)[1])
        return self._source.load(segment)


def _work(source: FilesSource, pipe: Connection) -> None:
    for number in SIGNALS:  # the main process decides when to stop
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    telling = TellingSource(source, lambda name: pipe.send(("sample", name)))
    with contextlib.suppress(BrokenPipeError):  # of a run that has ended meanwhile
        pipe.send(("ready", None))
    while True:
        try:
            function, task = pipe.recv()
        except (EOFError, ConnectionError):
            return
        try:
            answer = "done", function(telling, task)
        except Exception as error:
            error.add_note(traceback.format_exc())
            answer = "error", error
        with contextlib.suppress(BrokenPipeError):
            try:
                pipe.send(answer)
            except RuntimeError as error:  # torch's, before anything is sent
                pipe.send(("error", UserError(f"--num-workers: {error}: {_ROOM}")))


def _exit_with_parent() -> None:
    """End this worker if its parent is killed while it computes."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
