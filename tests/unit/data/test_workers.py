"""Data workers that are killed, stopped or stuck are replaced; nothing of their work is lost or done wrong. It lies in
memory that the training process has mapped once, and that is used again.
"""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from megavlm.backend import host_copies
from megavlm.backend.host_copies import SharedMemories, SharedMemory
from megavlm.command_line.parsing import parse
from megavlm.data import workers
from megavlm.data.file_source import FilesSource
from megavlm.data.types import CollatedBatch
from megavlm.data.workers import WorkerPool, _room, _WorkerLost, loaded, stored
from megavlm.errors import UserError
from megavlm.inputs.batch import ImageBatch, MicroBatch
from tests.support.data_files import sources_of, write_all
from tests.support.micro_batch import micro_batch
from tests.support.training import SMALL

TASKS = [range(start, start + 4) for start in range(0, 32, 4)]


def tokens(source: FilesSource, sample: int) -> list[list[int]]:
    return [encoded.tokens.tolist() for encoded in source.encode(sample).samples]


def encode(source: FilesSource, samples: Sequence[int]) -> list[list[list[int]]]:
    return [tokens(source, sample) for sample in samples]


def new_pages(source: FilesSource, count: int) -> int:
    """Return the pages that the kernel has to clear for two more blocks of `count` bytes."""
    for _ in range(3):
        before, blocks = resource.getrusage(resource.RUSAGE_SELF).ru_minflt, [bytearray(count), bytearray(count)]
        del blocks
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


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


def pool_in_thread(monkeypatch: pytest.MonkeyPatch) -> WorkerPool:
    """Return a pool whose one worker is no process, but the thread that would wait for it."""

    def worker(source: Any) -> Any:
        call = lambda function, task, memory: function(source, task)  # noqa: E731
        return SimpleNamespace(call=call, lost=False, kill=lambda: None, close=lambda: None)

    monkeypatch.setattr(workers, "_Worker", worker)
    return WorkerPool(cast(Any, None), 1, timeout=0)


def test_a_step_does_not_wait_for_a_whole_window(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, both, order = threading.Event(), threading.Event(), list[str]()

    def work(source: Any, task: str) -> None:
        begun.set()
        both.wait()
        order.append(task)

    with closing(pool_in_thread(monkeypatch)) as pool:
        window, step = (threading.Thread(target=pool.map, args=(work, tasks)) for tasks in (["window"] * 9, ["step"]))
        window.start()
        begun.wait()
        time.sleep(0.05)  # in which all of the window could be queued
        step.start()
        while pool._threads._work_queue.empty():
            time.sleep(0.001)
        both.set()
        window.join()
        step.join()
    assert order[:2] == ["window", "step"]


def test_no_task_begins_after_one_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = list[int]()

    def work(source: Any, task: int) -> None:
        begun.append(task)
        if task == 1:
            raise ValueError(task)

    with closing(pool_in_thread(monkeypatch)) as pool, pytest.raises(ValueError, match="1"):
        pool.map(work, range(9))
    assert begun == [0, 1]


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


@pytest.mark.slow
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


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="of glibc")
def test_a_worker_uses_memory_again(source: FilesSource, pool_of: Any) -> None:
    assert pool_of(1, timeout=0).map(new_pages, [6_000_000])[0] < 100, "of 2,930"


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


CPU, GPU = torch.device("cpu"), torch.device("cuda", 3)


def made(patches: int) -> MicroBatch:
    """Return a micro-batch with so many patches, in bf16, and a tensor of 12 bytes."""
    batch = micro_batch(1, dtype=torch.bfloat16)
    text = replace(batch.text, cu_seqlens=torch.tensor([0, 5, 64], dtype=torch.int32))
    pixels = torch.arange(patches * 100, dtype=torch.float32).view(patches, 100).bfloat16()
    return replace(batch, text=text, images=ImageBatch(batch.image_sizes, pixels), features=None)


def passed(memories: SharedMemories, memory: SharedMemory, batch: MicroBatch) -> MicroBatch:
    """Return what the training process gets of a worker's micro-batch."""
    worker = SharedMemory(os.dup(memory.file))
    sent = stored(CollatedBatch(batch), worker)
    worker.close()
    assert len(sent.description) < 2000, "tensors do not pass through the pipe"
    return loaded(sent, memories, memory).batch


def tensors(batch: MicroBatch) -> dict[str, Tensor]:
    assert batch.images is not None
    return {**batch.text.tensors(), "patches": batch.images.patches}


def check(found: MicroBatch, batch: MicroBatch) -> None:
    batch = batch.with_tensors(batch.host_tensors())  # equal rows of positions are one
    assert tensors(found).keys() == tensors(batch).keys()
    assert (found.image_sizes, found.text.lengths) == (batch.image_sizes, batch.text.lengths)
    for name, expected in tensors(batch).items():
        got = tensors(found)[name]
        assert got.dtype == expected.dtype
        assert torch.equal(got, expected), name
        assert got.is_contiguous()
        assert not got.numel() or got.data_ptr() % 64 == 0, "as torch aligns its own"


def test_memory_is_used_again_once_no_tensor_lies_in_it() -> None:
    memories = SharedMemories(CPU)
    first = memories.take()
    for patches in (3, 300, 2):  # it grows, and what it was before can be overwritten
        found = passed(memories, first, made(patches))
        assert memories.take() is not first, "it is still needed"
        check(found, made(patches))
        row = tensors(found)["patches"][1:]
        del found
        assert memories.take() is not first, "a part of it is"
        assert torch.equal(row, tensors(made(patches))["patches"][1:])
        del row
        assert memories.take() is first
    found = passed(memories, first, made(2))
    memories.close()
    check(found, made(2))
    del found
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(first.file)


def test_memory_is_pinned_once_and_the_device_has_read_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in of `torch.cuda` records which calls pin and copy."""
    pinned: dict[int, int] = {}
    events: list[Any] = []
    here: list[torch.device] = []

    class Runtime:
        def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
            assert here == [GPU], "a context would be created on the first device"
            pinned[address] = size
            return 0

        def cudaHostUnregister(self, address: int) -> None:
            del pinned[address]

    class Here:
        def __init__(self, device: torch.device) -> None:
            self.device = device

        def __enter__(self) -> None:
            here.append(self.device)

        def __exit__(self, *_: object) -> None:
            here.pop()

    class Event:
        done = False

        def record(self, stream: str) -> None:
            assert stream == "stream of cuda:3"
            events.append(self)

        def query(self) -> bool:
            return self.done

    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    monkeypatch.setattr(torch.cuda, "device", Here)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    memories = SharedMemories(GPU)
    memory = memories.take()
    for patches in (300, 200, 400):
        found = passed(memories, memory, made(patches))
        address = found.text.tokens.data_ptr()
        assert pinned == {address: memory.bytes}
        del found
        assert memories.take() is not memory, "a copy to the device may still read it"
        events[-1].done = True
        assert memories.take() is memory
    memories.give_back(memory)
    memories.close()
    assert not pinned


@pytest.mark.parametrize("refused", ["memfd_create", "ftruncate", "mmap"])
def test_a_lack_of_memory_names_the_option(monkeypatch: pytest.MonkeyPatch, refused: str) -> None:
    memories = SharedMemories(CPU)
    memory = memories.take()
    sent = stored(CollatedBatch(made(1)), SharedMemory())

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(host_copies.mmap if refused == "mmap" else host_copies.os, refused, refuse)

    def everything() -> None:
        with _room():
            memories.take()
        stored(CollatedBatch(made(3)), memory)
        loaded(sent, memories, memory)

    told = r"^--num-workers: no memory can be shared with data workers \(Cannot allocate memory\): .*--num-workers 0"
    with pytest.raises(UserError, match=told):
        everything()
