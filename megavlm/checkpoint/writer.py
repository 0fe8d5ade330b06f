"""Run the writer process of a rank, which writes the rank's part of each checkpoint while training continues.

The writer has the rank's staged state in shared memory and communicates with the rank through a socket; if the writer
fails, the rank continues. Each writer leaves a report of its files, and rank 0's writer commits the checkpoint once it
has the reports of all ranks. A writer whose rank has ended exits without finishing the checkpoint.

A writer updates its sign of life whenever it makes progress. After two minutes without one, the rank kills its writer.
If the files of a rank do not grow for as long, rank 0's writer gives up the save and names the rank.

megavlm does not use megatron-core's two background writers: one forks a process with threads at every save, the other
needs a CUDA device, both finish by collectives of the training ranks, and neither computes checksums.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch.distributed.checkpoint import Metadata

from megavlm.backend.host_copies import SharedMemory
from megavlm.checkpoint import folders
from megavlm.checkpoint.folders import Keep
from megavlm.checkpoint.manifest import TENSORS, FileSum, attempt_of, in_words
from megavlm.checkpoint.staging import (
    NotFinite,
    Places,
    SaveError,
    Written,
    items_at,
    write_metadata,
    write_share,
)
from megavlm.files import replace_file

ATTEMPTS = 2
PATIENCE = 120.0  # seconds without progress after which a writer is given up
_LOOK = 0.05  # seconds between checks for reports, for each rank of the world …
_LONGEST_LOOK = 1.0  # … and at most: checks for many ranks load the file system's server
_SILENT = 30.0  # seconds without a report after which the sizes of files are checked
_PAUSE = 1.0  # seconds before another attempt
_OFTEN = 0.1  # seconds between signs of life


@dataclass(frozen=True)
class SaveJob:
    """A rank's part of a save."""

    root: Path
    iteration: int
    attempt: str  # distinguishes this save's folder from those of earlier attempts
    rank: int
    world: int
    places: Places
    whole: dict[str, bytes]
    metadata: Metadata | None  # on rank 0; None: as in the last save
    keep: Keep
    memory: int  # size of the shared memory
    failure: str | None = None  # the reason if this rank has nothing to write


@dataclass(frozen=True)
class Outcome:
    """Result of a save job: the error if the job failed, else None; and the error of a failed first attempt.

    `not_finite` is the name of a tensor that has a NaN or an infinity: the job is not tried again.
    """

    error: str | None
    retried: str | None = None
    not_finite: str | None = None


class Abandoned(Exception):
    """Raised in the writer if its rank has ended or closed the connection."""


class Reports:
    """The ranks' reports of one save, as files in a separate folder, which `folders.sweep` deletes."""

    def __init__(self, folder: Path) -> None:
        """Use `folder`, which is created with the first report."""
        self._folder = folder

    def leave(self, rank: int, written: Written | None, error: str | None, not_finite: str | None = None) -> None:
        """Write a rank's report: the places and sums of its files, or its error. The report appears atomically."""
        content: dict[str, Any] = {"error": error, "not_finite": not_finite}
        if written is not None:
            content["places"] = written.places
            content["sums"] = {name: [each.bytes, each.crc32] for name, each in written.sums.items()}
        self._folder.mkdir(parents=True, exist_ok=True)
        replace_file(self._folder / f"{rank}.json", json.dumps(content))

    def of(self, rank: int) -> Written | None:
        """Return the places and sums of a rank's files; None if it has not reported. Raises SaveError if it failed."""
        try:
            content = json.loads((self._folder / f"{rank}.json").read_bytes())
        except FileNotFoundError:
            return None
        if content["not_finite"] is not None:
            raise NotFinite(content["not_finite"])
        if content["error"] is not None:
            raise SaveError(content["error"])
        return Written(content["places"], {name: FileSum(*each) for name, each in content["sums"].items()})

    def of_all(self, world: int, checkpoint: Path, go_on: Callable[[], None]) -> list[Written]:
        """Wait for the reports of all ranks and return them, by rank; `go_on` is called meanwhile.

        From 20 ranks on, the folder of reports is listed once a second. If no rank has reported for 30 s, the sizes of
        files in `checkpoint` are checked, for ranks without a report alone: a save of N ranks in T seconds takes N
        reads of reports, T listings, and at most T / 30 times the `stat` of N ranks' files.

        Raises SaveError if a rank failed, or if files of the ranks without a report do not grow for PATIENCE seconds.
        """
        found: dict[int, Written] = {}
        last = looked = time.monotonic()
        size = 0
        while True:
            names = set(os.listdir(self._folder))
            missing = [rank for rank in range(world) if rank not in found]
            reported = {rank: self.of(rank) for rank in missing if f"{rank}.json" in names}
            found |= {rank: written for rank, written in reported.items() if written is not None}
            if len(found) == world:
                return [found[rank] for rank in range(world)]
            now = time.monotonic()
            if reported:
                last = looked = now
            elif now - looked >= _SILENT:
                looked = now
                if (grown := _bytes_of(missing, checkpoint)) != size:
                    last, size = now, grown
            if now - last > PATIENCE:
                raise SaveError(f"the writers of ranks {missing} wrote nothing for {PATIENCE:.0f} s")
            go_on()
            time.sleep(min(_LOOK * world, _LONGEST_LOOK))


def _bytes_of(ranks: Iterable[int], checkpoint: Path) -> int:
    """Return the total size of the tensor files that `ranks` have in a checkpoint's folder."""
    theirs = {f"__{rank}" for rank in ranks}
    files = [name for name in os.listdir(checkpoint) if name.endswith(TENSORS) and name.rpartition("_")[0] in theirs]
    return sum((checkpoint / name).stat().st_size for name in files)


def serve(connection: Connection, pulse: Any, file: int) -> NoReturn:
    """Run the save jobs of a rank until it closes the connection, then exit. `file` is the shared memory's descriptor.

    `pulse` is a number in shared memory: the time of the writer's last sign of life.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # meant for the rank, which ends this process when it ends
    torch.set_num_threads(1)  # a fork lacks torch's threads, and would wait for them
    os.nice(10)  # training has priority
    memory = SharedMemory(file)
    metadata: Metadata | None = None
    try:
        while True:
            job: SaveJob = connection.recv()
            pulse.value = time.monotonic()
            metadata = job.metadata or metadata
            memory.reserve(job.memory)
            connection.send(do(replace(job, metadata=metadata), memory, partial(_check, connection, pulse)))
    except (EOFError, OSError, Abandoned, KeyboardInterrupt):
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def _check(connection: Connection, pulse: Any) -> None:
    """Update the sign of life. Raises Abandoned if the rank has closed the connection: it sends nothing else now."""
    if time.monotonic() - pulse.value < _OFTEN:
        return
    pulse.value = time.monotonic()
    if connection.poll(0):
        raise Abandoned


def do(job: SaveJob, memory: SharedMemory, go_on: Callable[[], None]) -> Outcome:
    """Write a rank's files, report them, and on rank 0 commit the checkpoint; return the outcome."""
    folder, reports = folder_of(job), reports_of(job)
    failures: list[str] = []
    try:
        if job.rank == 0:
            with suppress(OSError), _going_on(go_on):  # a killed save left up to a checkpoint, whose room may be needed
                folders.sweep(job.root, attempt=job.attempt)
        written = _written(job, folder, memory, failures, go_on)
        reports.leave(job.rank, written, None)
        if job.rank == 0:
            _commit(job, folder, reports, go_on)
        return Outcome(None, failures[0] if failures else None)
    except (SaveError, OSError) as failure:
        error = str(failure) if isinstance(failure, SaveError) else in_words(failure)
        not_finite = error if isinstance(failure, NotFinite) else None
        with suppress(OSError):
            reports.leave(job.rank, None, error, not_finite)
        if job.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
        return Outcome(error, failures[0] if failures else None, not_finite=not_finite)


def _written(
    job: SaveJob, folder: Path, memory: SharedMemory, failures: list[str], go_on: Callable[[], None]
) -> Written:
    """Write a rank's files in at most ATTEMPTS attempts; append the error of each failed one to `failures`.

    Return the places and sums of the files. Raises SaveError.
    """
    if job.failure is not None:
        raise SaveError(job.failure)
    while True:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            return write_share(folder, items_at(memory, job.places), job.whole, go_on=go_on)
        except NotFinite:
            raise
        except SaveError as failure:
            failures.append(str(failure))
        except OSError as failure:
            failures.append(f"{folder} cannot be written: {in_words(failure)}")
        if len(failures) == ATTEMPTS:
            raise SaveError(failures[-1])
        time.sleep(_PAUSE)
        go_on()


def folder_of(job: SaveJob) -> Path:
    """Return the temporary folder to which a save writes its checkpoint."""
    return job.root / f"tmp-iter_{job.iteration:07d}-{job.attempt}"


def reports_of(job: SaveJob) -> Reports:
    """Return the `Reports` of a job's save."""
    return Reports(job.root / f"tmp-reports-{job.iteration:07d}-{job.attempt}")


def is_committed(job: SaveJob) -> bool:
    """Return whether the checkpoint of the job's save is committed."""
    return attempt_of(folders.folder_for(job.root, job.iteration)) == job.attempt


def _commit(job: SaveJob, folder: Path, reports: Reports, go_on: Callable[[], None]) -> None:
    """Wait for all ranks' reports, commit the checkpoint, and delete those that are not kept. Raises SaveError."""
    written = reports.of_all(job.world, folder, go_on)
    with _going_on(go_on):
        assert job.metadata is not None
        write_metadata(folder, job.metadata, written)
        sums = {name: total for each in written for name, total in each.sums.items()}
        go_on()
        folders.commit(folder, folders.folder_for(job.root, job.iteration), sums, attempt=job.attempt)
        try:
            folders.prune(job.root, job.keep)
            folders.sweep(job.root)
        except OSError as error:  # the checkpoint is saved all the same
            print(f"warning: old checkpoints in {job.root} stay: {in_words(error)}", file=sys.stderr, flush=True)


@contextmanager
def _going_on(go_on: Callable[[], None]) -> Iterator[None]:
    """Call `go_on` in a thread every second while the block runs: a flush or deletion cannot call it in between."""
    done = threading.Event()

    def beat() -> None:
        with suppress(Abandoned):
            while not done.wait(1.0):
                go_on()

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
