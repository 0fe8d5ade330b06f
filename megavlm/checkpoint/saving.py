"""Save checkpoints while training goes on: a rank copies its state into shared memory, and its writer does the rest.

At most one save is under way; the next one waits for its end. A save that fails does not end the run: the checkpoints
before it are whole.
"""

from __future__ import annotations

import json
import multiprocessing
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.reduction import send_handle
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megavlm.checkpoint import folders
from megavlm.checkpoint.manifest import SUMMARY, in_words
from megavlm.checkpoint.retention import Keep
from megavlm.checkpoint.staging import Places, Staging
from megavlm.checkpoint.tensor_files import Item
from megavlm.checkpoint.writer import Job, Outcome, serve
from megavlm.checkpoint.writing import Share
from megavlm.errors import BadNumbers

_GIVEN_UP = 20.0  # seconds that a run that ends by an error waits for a save that is under way


@dataclass(frozen=True)
class SaveReport:
    """How a save ended on this rank; on rank 0, how the whole checkpoint's save ended."""

    iteration: int
    folder: Path
    error: str | None
    retried: str | None  # what the first attempt said, if there was another
    seconds: float  # from its beginning until the checkpoint counted
    bytes: int  # of this rank


class Saver:
    """Runs the saves of a rank. Make it before threads and process groups exist: it forks the process that writes."""

    def __init__(self, root: Path, keep: Keep) -> None:
        self._root, self._keep = root, keep
        self._staging = Staging()
        self._job: Job | None = None  # under way
        self._began = 0.0
        self._again = False  # whether another writer may do the job
        self._reports: list[SaveReport] = []
        self._start()

    def begin(self, share: Share, summary: dict[str, Any]) -> None:
        """Begin to save this rank's shard, and return as soon as it is copied. Every rank must call this.

        Raises BadNumbers, on all ranks, for state that is not finite.
        """
        self.wait()
        self._began = time.perf_counter()
        iteration = int(summary["iteration"])
        attempt = _agree_to_save(share.files, iteration, self._root)
        before = self._staging.file
        places: Places = {}
        failure = None
        try:
            places = self._staging.copy(share.files)
        except OSError as error:  # this rank's writer must report it: the other writers wait
            failure = f"rank {dist.get_rank()} has no host memory for its part ({in_words(error)})"
        whole = dict(share.whole)
        if dist.get_rank() == 0:
            whole[SUMMARY] = (json.dumps(summary, indent=2) + "\n").encode()
        new = self._staging.bytes if self._staging.bytes and self._staging.file != before else None
        self._job = Job(
            root=self._root,
            iteration=iteration,
            attempt=attempt,
            rank=dist.get_rank(),
            world=dist.get_world_size(),
            places=places,
            whole=whole,
            metadata=share.metadata,
            keep=self._keep,
            memory=new,
            failure=failure,
        )
        self._again = True
        self._send(self._job)

    def poll(self) -> list[SaveReport]:
        """Return the reports of saves that have ended since the last call, without waiting."""
        if self._job is not None and self._connection.poll(0):
            self._receive()
        reports, self._reports = self._reports, []
        return reports

    def wait(self) -> None:
        """Wait for the end of the save that is under way; `poll` returns its report."""
        while self._job is not None:
            self._receive()

    def close(self) -> None:
        """End the writer. A save that is under way has some seconds to end."""
        if self._job is not None and self._connection.poll(_GIVEN_UP):
            self._receive()
        self._connection.close()
        self._process.join(timeout=1)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._staging.close()

    def _start(self) -> None:
        context = multiprocessing.get_context("fork")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, self._connection), daemon=True)
        self._process.start()
        theirs.close()

    def _send(self, job: Job) -> None:
        try:
            self._connection.send(job)
            if job.memory is not None:
                send_handle(self._connection, self._staging.file, self._process.pid)
        except (BrokenPipeError, ConnectionResetError):
            self._lost()

    def _receive(self) -> None:
        """Take the outcome of the save that is under way; waits for it."""
        assert self._job is not None
        try:
            outcome: Outcome = self._connection.recv()
        except (EOFError, ConnectionResetError):
            return self._lost()
        self._end(outcome)

    def _lost(self) -> None:
        """Start another writer after one has died, and let it do the same work once more from the same memory."""
        assert self._job is not None
        self._connection.close()
        self._process.join()
        reason = f"the process that writes checkpoints died (exit code {self._process.exitcode})"
        self._start()
        job, self._job = self._job, None
        if not self._again:
            self._job = job
            self._end(Outcome(reason, None, 0))
            # The next save tells the writer of the memory, whatever the memory is.
            self._staging.close()
            return
        self._again = False
        self._job = Job(**{**vars(job), "memory": self._staging.bytes or None})
        self._send(self._job)

    def _end(self, outcome: Outcome) -> None:
        assert self._job is not None
        iteration = self._job.iteration
        seconds = time.perf_counter() - self._began
        folder = folders.folder_for(self._root, iteration)
        self._reports.append(SaveReport(iteration, folder, outcome.error, outcome.retried, seconds, outcome.bytes))
        self._job = None


def _serve(connection: Connection, of_the_rank: Connection) -> None:
    of_the_rank.close()  # else this process would hold open the socket whose end ends it
    serve(connection)


def _agree_to_save(files: Mapping[str, Sequence[Item]], iteration: int, root: Path) -> str:
    """Return a name of this save, the same on all ranks. Raises BadNumbers on all where state of any is not finite."""
    found: list[tuple[str | None, str]] = [(None, "")] * dist.get_world_size()
    dist.all_gather_object(found, (non_finite(files), f"{time.time_ns():x}"))
    if bad := next((name for name, _ in found if name is not None), None):
        before = folders.newest(root)
        raise BadNumbers(
            f"{bad} is not finite after iteration {iteration}, which is not saved; the last checkpoint is "
            f"{before if before is not None else 'none'}. Start from it with a lower --lr or with --clip-grad"
        )
    return found[0][1]


def non_finite(files: Mapping[str, Sequence[Item]]) -> str | None:
    """Return the name of a tensor that has a NaN or an infinity, or None. The host waits for the device once."""
    found = [
        (index.fqn, torch.stack(torch.aminmax(data.detach())).float())
        for items in files.values()
        for index, data in items
        if isinstance(data, torch.Tensor) and data.is_floating_point() and data.itemsize > 1 and data.numel()
    ]
    if not found:
        return None
    extremes = torch.stack([each.to(found[0][1].device) for _, each in found])
    bad = extremes.isfinite().logical_not().any(dim=1).tolist()
    return next((name for (name, _), each in zip(found, bad, strict=True) if each), None)
