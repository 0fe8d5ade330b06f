"""Run data tasks in worker processes; replace a worker that dies or hangs, and repeat its task.

Tasks have no side effects, so they can be repeated. Each worker has its own pipe and a thread of this process that
waits for the worker, so that no lock or queue is shared with a process that may be killed at any moment. The thread
does little work: micro-batches are passed in shared memory. Each worker also writes the name of the sample that it
begins to shared memory, so that a message can name the sample at which the worker died or hung.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch

from megavlm.backend.host_copies import SharedMemories, SharedMemory
from megavlm.data.broadcast import copy_to, deserialize, serialize, size_of
from megavlm.data.types import CollatedBatch, EncodedRecord, Sample, SampleId, Segment, StepData
from megavlm.errors import UserError
from megavlm.inputs.bad_sample import Skipped
from megavlm.resilience.signals import SIGNALS, how_it_ended

if TYPE_CHECKING:
    from megavlm.data.file_source import FilesSource

Result = TypeVar("Result")

ATTEMPTS = 3  # workers that may be lost at one task before the run fails
_NOTE = struct.Struct("d1016s")  # the time of a worker's last sign of life, and the name of its sample
_START = 300.0  # least timeout in seconds for a worker's imports
_CPU = torch.device("cpu")
_SPARE = 8  # memory that has to grow gets 1 / _SPARE more than needed, so that it seldom grows
_LOOK = 1.0  # seconds between checks for workers that hang
_KEPT = {-3: 2**25, -1: 2**28}  # glibc's M_MMAP_THRESHOLD, of which this is the most, and M_TRIM_THRESHOLD: bytes
_STARTING = threading.Lock()
_SCRIPT = {"__file__", "__spec__"}  # attributes of `__main__` by which a spawned process finds its parent's script


class WorkerPool:
    """Pool of worker processes that call `function(source, task)`, each with its own copy of the source."""

    def __init__(
        self,
        source: FilesSource,
        workers: int,
        *,
        timeout: float,
        device: torch.device = _CPU,
        report: Callable[[str], None] = lambda line: None,
    ) -> None:
        """Start the workers.

        A worker that gives no sign of life for `timeout` seconds is replaced (0: never). Micro-batches are pinned for
        `device`, if it is a GPU. `report` is called with a line about each replacement. Raises UserError if
        processes cannot be started.
        """
        self._source = source
        self._memories = SharedMemories(device)
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
        """Return `function(source, task)` for each task, in order.

        Calls of several threads take turns, so that the micro-batches of a step do not wait for a whole window. Raises
        UserError, with the name of the sample, if several workers die or hang at one task.
        """
        room = threading.Semaphore(len(self._workers))  # tasks begin in the order in which they are submitted
        failed, futures = threading.Event(), list[Future[Result]]()

        def ended(future: Future[Result]) -> None:
            if future.cancelled() or future.exception() is not None:
                failed.set()
            room.release()

        for task in tasks:
            room.acquire()
            if failed.is_set():  # its error is raised below
                break
            futures.append(self._threads.submit(self._call, function, task))
            futures[-1].add_done_callback(ended)
        return [future.result() for future in futures]

    def close(self) -> None:
        """Kill the workers and drop their tasks. Further calls do nothing: two loaders may share the pool."""
        if self._closed.is_set():
            return
        self._closed.set()
        for worker in self._workers:
            worker.kill()
        self._threads.shutdown(wait=True, cancel_futures=True)
        for worker in self._workers:
            worker.close()
        self._memories.close()

    def _call(self, function: Callable[[Any, Any], Result], task: Any) -> Result:
        worker, memory = self._idle.get(), None
        try:
            with _room():
                memory = self._memories.take()
            result = self._asked(worker, function, task, memory)
            if isinstance(result, StoredBatch):
                result, memory = loaded(result, self._memories, memory), None
            return cast(Result, result)
        finally:
            self._idle.put(worker)
            if memory is not None:
                self._memories.give_back(memory)

    def _asked(self, worker: _Worker, function: Callable[[Any, Any], Any], task: Any, memory: SharedMemory) -> Any:
        losses = 0
        while True:
            if worker.lost:
                worker.start()
                if self._closed.is_set():  # `close` has killed the one before
                    worker.kill()
            try:
                return worker.call(function, task, memory)
            except _WorkerLost as lost:
                if self._closed.is_set():
                    raise
                losses += 1
                self._report_loss(worker, lost, last=losses == ATTEMPTS)

    def _report_loss(self, worker: _Worker, lost: _WorkerLost, *, last: bool) -> None:
        """Report a lost worker; raise UserError if it was the last attempt at a task."""
        sample = worker.sample
        place = f"at sample {sample}" if sample else "before it began a sample"
        line = f"a data worker {lost} {place}"
        if not last:
            return self._report(f"{line}: another takes its place")
        remedy = "repair or remove that sample" if sample else "--num-workers 0 reads without them"
        raise UserError(
            f"{line}, as {ATTEMPTS - 1} before it: {remedy}; if memory ran out, lower --num-workers or "
            "--max-image-pixels; if storage does not answer, look at it; if it is only slow, raise "
            "--data-worker-timeout"
        ) from lost

    def _end_hanging(self) -> None:
        """Kill workers that are silent for too long; the thread that waits for such a worker finds its pipe closed."""
        while not self._closed.wait(_LOOK):
            for worker in self._workers:
                if self._timeout and worker.silence() > (self._timeout if worker.ready else max(self._timeout, _START)):
                    worker.hangs = True
                    worker.kill()


class _WorkerLost(Exception):
    """Raised if a worker process has ended or hung; the message says how."""


class _Worker:
    """A worker process with the parent's end of its pipe, and its `Note` in shared memory."""

    def __init__(self, source: FilesSource) -> None:
        self._source = source
        self._note = Note(SharedMemory())
        self.start()

    def start(self) -> None:
        """Start the process, also in place of a process that has ended."""
        # Spawned, not forked: this process has threads of gloo and NCCL, and perhaps a CUDA context.
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        process = context.Process(target=_work, args=(self._source, theirs), daemon=True)
        with _alone():
            process.start()
        self._process = process
        self._note.write("", at=0.0)
        self._known: set[int] = set()  # file descriptors of the memories that the process has mapped
        self._give(self._note.memory)
        theirs.close()  # so that the pipe ends with the process
        self.hangs = self.lost = False
        self._asked: float | None = None  # when the current task was sent; None without a task

    def call(self, function: Callable[[Any, Any], Any], task: Any, memory: SharedMemory) -> Any:
        """Run a task and return `function(source, task)`; a `CollatedBatch` comes as a `StoredBatch` in `memory`.

        Raises _WorkerLost if the process ends, and any error of the function.
        """
        self._asked = time.monotonic()
        try:
            self._pipe.send((function, task, memory.file))
            if memory.file not in self._known:
                self._give(memory)
            failed, result = self._pipe.recv()
        except (EOFError, ConnectionError) as error:
            raise _WorkerLost(self._how_it_ended()) from error
        finally:
            self._asked = None
        if failed:
            raise result
        return result

    def _give(self, memory: SharedMemory) -> None:
        send_handle(self._pipe, memory.file, self._process.pid)
        self._known.add(memory.file)

    @property
    def sample(self) -> str:
        """Return the name of the sample that the worker has begun; "" between two tasks."""
        return self._note.read()[1]

    @property
    def ready(self) -> bool:
        """Return whether the process has finished its imports."""
        return self._note.read()[0] > 0

    def silence(self) -> float:
        """Return the seconds since the last sign of life of a worker that has a task; 0 without a task."""
        asked = self._asked
        return 0.0 if asked is None else time.monotonic() - max(asked, self._note.read()[0])

    def kill(self) -> None:
        self._process.kill()

    def close(self) -> None:
        """Free the pipe and the memory of a process that was killed."""
        self._pipe.close()
        self._note.memory.close()

    def _how_it_ended(self) -> str:
        self._process.kill()
        ended = how_it_ended(self._process)
        self._pipe.close()
        self.lost = True
        return "hung (--data-worker-timeout)" if self.hangs else ended


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Isolate processes that are spawned within this context from the working directory and the main script.

    They do not import modules from the working directory, which may have a `pickle.py` next to the data. They do not
    run the main script again: a script without `if __name__ == "__main__"` would start a run in each.
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


class Note:
    """The worker's current sample and last sign of life, in shared memory, so that no message has to be sent."""

    def __init__(self, memory: SharedMemory) -> None:
        memory.reserve(_NOTE.size)
        self.memory = memory
        self._bytes = memory.tensor(0, [_NOTE.size], torch.uint8).numpy().data

    def write(self, sample: str, *, at: float | None = None) -> None:
        """Write the name of the sample that begins ("" for none), and the time."""
        _NOTE.pack_into(self._bytes, 0, time.monotonic() if at is None else at, sample.encode()[: _NOTE.size - 8])

    def read(self) -> tuple[float, str]:
        """Return the time of the last sign of life (0 before the first) and the sample's name."""
        at, sample = _NOTE.unpack_from(self._bytes)
        return at, sample.rstrip(b"\0").decode(errors="ignore")


@dataclass(frozen=True)
class StoredBatch:
    """Description of a `CollatedBatch` whose tensors are in shared memory; it is sent through the pipe instead."""

    description: bytes
    skipped: tuple[Skipped, ...]
    samples: tuple[SampleId, ...]


def stored(collated: CollatedBatch, memory: SharedMemory) -> StoredBatch:
    """Write a micro-batch to shared memory and return its description. Raises UserError if the memory cannot grow."""
    batch = collated.batch.with_tensors(collated.batch.host_tensors())  # contiguous, for the copy to a device
    step = StepData([batch], read=0, skipped=(), imbalance=None)
    description, tensors = serialize(step, pixels=True)
    if (size := size_of(tensors)) > memory.bytes:
        with _room():
            memory.reserve(size + size // _SPARE)
    copy_to(memory.tensor(0, [size], torch.uint8), tensors)
    return StoredBatch(description, collated.skipped, collated.samples)


def loaded(batch: StoredBatch, memories: SharedMemories, memory: SharedMemory) -> CollatedBatch:
    """Return the micro-batch in shared memory; its tensors are views, pinned for a GPU. Raises UserError."""
    with _room():
        whole = memories.lend(memory)
    return CollatedBatch(deserialize(batch.description, whole).batches[0], batch.skipped, batch.samples)


@contextlib.contextmanager
def _room() -> Iterator[None]:
    """Raise UserError for an OSError within this context: no memory can be shared with workers."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"--num-workers: no memory can be shared with data workers ({error.strerror}): lower it, allow more open "
            "files (ulimit -n), or give the machine more memory; --num-workers 0 reads without them"
        ) from error


class TellingSource:
    """Wrapper of a source that calls `tell` with the name of each sample before the sample is read."""

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
    keep_freed_memory()
    memories: dict[int, SharedMemory] = {}
    with contextlib.suppress(EOFError, ConnectionError):  # of a run that has ended meanwhile
        note = Note(SharedMemory(recv_handle(pipe)))
        telling = TellingSource(source, note.write)
        while True:
            note.write("")
            function, task, number = pipe.recv()
            if number not in memories:
                memories[number] = SharedMemory(recv_handle(pipe))
            pipe.send(_answer(function, telling, task, memories[number]))


def keep_freed_memory() -> None:
    """Let this process reuse large blocks of memory that it has freed, up to 256 MiB.

    By default glibc returns them to the kernel, which has to clear each page of the next block. On the way of an image
    of two megapixels to patches these are 7,500 pages, and clearing them takes longer than decoding the image.
    """
    with contextlib.suppress(AttributeError):  # another C library
        for parameter, size in _KEPT.items():
            ctypes.CDLL(None).mallopt(parameter, size)


def _answer(
    function: Callable[[Any, Any], Any], source: TellingSource, task: Any, memory: SharedMemory
) -> tuple[bool, Any]:
    """Return whether `function(source, task)` failed, and its result or error."""
    try:
        result = function(source, task)
        return False, stored(result, memory) if isinstance(result, CollatedBatch) else result
    except Exception as error:
        error.add_note(traceback.format_exc())
        return True, error


def _exit_with_parent() -> None:
    """Wait for the parent process to end, then end this worker, even while it computes."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
