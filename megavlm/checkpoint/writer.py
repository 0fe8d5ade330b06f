"""Write a rank's part of each checkpoint in a process of its own, while the rank trains on.

It has the rank's staged state in shared memory and speaks to the rank through a socket; whatever happens to it, the
rank goes on. Writers tell each other through the folder of the checkpoint: each leaves a report of its files there,
and that of rank 0 commits the checkpoint once it has the reports of all. Without the rank it ends: a checkpoint that
nobody waits for is not finished.
"""

from __future__ import annotations

import json
import mmap
import os
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch.distributed.checkpoint import Metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.storage import WriteResult

from megavlm.checkpoint import folders, retention
from megavlm.checkpoint.manifest import FileSum, in_words
from megavlm.checkpoint.retention import Keep
from megavlm.checkpoint.staging import Places, items_at
from megavlm.checkpoint.tensor_files import SaveError, Written, write_metadata, write_share

ATTEMPTS = 2
_PAUSE = 1.0  # seconds before another attempt
_LOOK = 0.02  # seconds between looks for reports
PATIENCE = 600.0  # seconds without a new report until the save is given up


@dataclass(frozen=True)
class Job:
    """A rank's part of a save."""

    root: Path
    iteration: int
    attempt: str  # tells this save's folder from those of earlier attempts
    rank: int
    world: int
    places: Places
    whole: dict[str, bytes]
    metadata: Metadata | None  # on rank 0
    keep: Keep
    memory: int | None  # size of new shared memory, whose descriptor follows; None: as before
    failure: str | None = None  # why there is nothing to write


@dataclass(frozen=True)
class Outcome:
    """How a job ended: why it failed (None: it did not), why its first attempt failed, and the bytes written."""

    error: str | None
    retried: str | None
    bytes: int


class Abandoned(Exception):
    """Is raised in the writer when its rank is gone."""


def serve(connection: Connection) -> NoReturn:
    """Do the jobs of a rank until it closes the connection."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # meant for the rank, which ends this process when it ends
    torch.set_num_threads(1)  # a fork has none of the threads that it would wait for
    memory: mmap.mmap | None = None
    try:
        while True:
            job: Job = connection.recv()
            if job.memory is not None:
                file = recv_handle(connection)
                memory = mmap.mmap(file, job.memory)
                os.close(file)
            connection.send(do(job, memory, lambda: _check(connection)))
    except (EOFError, OSError, Abandoned, KeyboardInterrupt):
        os._exit(0)
    except BaseException:
        os._exit(1)


def _check(connection: Connection) -> None:
    """Raise Abandoned where the rank has closed the connection: it says nothing while a job is done."""
    if connection.poll(0):
        raise Abandoned


def do(job: Job, memory: mmap.mmap | None, go_on: Callable[[], None]) -> Outcome:
    """Write a rank's files, twice if need be, report them, and on rank 0 commit the checkpoint."""
    folder = folders.temporary_for(job.root, job.iteration).with_name(
        f"{folders.temporary_for(job.root, job.iteration).name}-{job.attempt}"
    )
    written, retried, error = None, None, job.failure
    for attempt in range(ATTEMPTS if job.failure is None else 0):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            written = write_share(folder, items_at(memory, job.places), job.whole, go_on=go_on)
            break
        except SaveError as failure:
            error = str(failure)
        except OSError as failure:
            error = f"{folder} cannot be written: {in_words(failure)}"
        if attempt + 1 < ATTEMPTS:
            retried = error
            time.sleep(_PAUSE)
            go_on()
    error = None if written is not None else error
    try:
        _report(folder, job.rank, written, error)
        if job.rank == 0:
            error = _commit(job, folder, go_on) if error is None else error
    except SaveError as failure:
        error = str(failure)
    except OSError as failure:
        error = in_words(failure)
    if error is not None and job.rank == 0:
        shutil.rmtree(folder, ignore_errors=True)
    return Outcome(error, retried, sum(each.bytes for each in written.sums.values()) if written else 0)


def _report(folder: Path, rank: int, written: Written | None, error: str | None) -> None:
    """Write a report of a rank's files into the checkpoint's folder, whole or not at all."""
    content: dict[str, Any] = {"error": error}
    if written is not None:
        content["items"] = [
            [
                each.index.fqn,
                None if each.index.offset is None else list(each.index.offset),
                each.index.index,
                each.storage_data.relative_path,
                each.storage_data.offset,
                each.storage_data.length,
            ]
            for each in written.results
        ]
        content["sums"] = {name: [each.bytes, each.crc32] for name, each in written.sums.items()}
    unfinished = folder / f"report-{rank}.tmp"
    unfinished.write_text(json.dumps(content))
    unfinished.rename(folder / f"report-{rank}.json")


def _read_report(path: Path) -> Written:
    content = json.loads(path.read_bytes())
    if content["error"] is not None:
        raise SaveError(content["error"])
    results = [
        WriteResult(
            MetadataIndex(name, None if offset is None else torch.Size(offset), number),
            length,
            _StorageInfo(file, start, length),
        )
        for name, offset, number, file, start, length in content["items"]
    ]
    return Written(results, {name: FileSum(*each) for name, each in content["sums"].items()})


def _commit(job: Job, folder: Path, go_on: Callable[[], None]) -> str | None:
    """Wait for all ranks' reports, then commit the checkpoint. Return why it was not committed; None if it was."""
    missing, written = set(range(job.world)), []
    last = time.monotonic()
    while missing:
        for rank in sorted(missing):
            path = folder / f"report-{rank}.json"
            if path.exists():
                written.append(_read_report(path))
                missing.remove(rank)
                last = time.monotonic()
        if missing:
            if time.monotonic() - last > PATIENCE:
                return f"ranks {sorted(missing)} did not write their files within {PATIENCE:.0f} s"
            go_on()
            time.sleep(_LOOK)
    for rank in range(job.world):
        (folder / f"report-{rank}.json").unlink()
    assert job.metadata is not None
    write_metadata(folder, job.metadata, written)
    go_on()
    sums = {name: total for each in written for name, total in each.sums.items()}
    folders.commit(job.root, job.iteration, sums, temporary=folder)
    retention.prune(job.root, newest=job.keep.newest, every=job.keep.every)
    retention.sweep(job.root)
    return None
