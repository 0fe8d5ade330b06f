"""Upload each checkpoint of a run to a store while training continues: `python -m megavlm.checkpoint.uploader`.

The uploader is a separate process, also from the writer. It keeps no state: it uploads the checkpoints that are in
RUN_DIR/checkpoints and not in the store, the newest first, so another one can replace an uploader that was killed. It
ends with the run that started it. No torch.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from megavlm.checkpoint import folders, remote
from megavlm.checkpoint.folders import Holds, Keep, kept, metrics_of
from megavlm.checkpoint.manifest import attempt_of
from megavlm.errors import UserError
from megavlm.resilience import events
from megavlm.storage.store import Store, StoreError

FINISH = "finish\n"  # the run writes this line when no checkpoint will follow
_LOOK = 1.0  # seconds between searches for checkpoints
_LONGEST_PAUSE = 60.0  # seconds between attempts
_TELL_AGAIN = 600.0  # seconds after which a lasting failure is reported again
GIVE_UP = 600.0  # seconds without a success, once no checkpoint will follow


@dataclass
class Mirror:
    """The checkpoints of a run and their copies in a store."""

    root: Path  # RUN_DIR/checkpoints
    store: Store
    keep: Keep
    _there: dict[int, str | None] | None = None  # iteration of a complete copy in the store → the save that wrote it
    _metrics: dict[int, Mapping[str, float]] = field(default_factory=dict)
    _parts: dict[tuple[int, str | None], set[str]] = field(default_factory=dict)  # files that are copied already
    _done: set[tuple[int, str | None]] = field(default_factory=set)  # copied checkpoints
    refused: set[tuple[int, str | None]] = field(default_factory=set)  # damaged checkpoints

    def due(self) -> Path | None:
        """Return the newest checkpoint that is not copied yet; None if all are copied or damaged. Raises StoreError."""
        for iteration, folder in reversed(folders.complete(self.root)):
            save = (iteration, attempt_of(folder))
            if self._copies().get(iteration, "") != save[1] and save not in self._done | self.refused:
                return folder
        return None

    def copy(self, folder: Path, go_on: remote.GoOn) -> int | None:
        """Copy a checkpoint and return the number of bytes moved; None, without a copy, if the run has deleted it.

        Raises StoreError, and UserError for a damaged checkpoint.
        """
        iteration, attempt = int(folder.name[5:]), attempt_of(folder)
        holds = Holds()
        try:
            if not holds.add(folder):
                return None
            self._copies().pop(iteration, None)
            done = self._parts.setdefault((iteration, attempt), set())
            moved = remote.upload(folder, self.store, done=done, go_on=go_on)
        except UserError:
            self.refused.add((iteration, attempt))
            raise
        finally:
            holds.release()
        self._copies()[iteration] = attempt
        self._done.add((iteration, attempt))  # `due` never returns it again, even if `prune` deletes the copy
        self._metrics[iteration] = metrics_of(folder)
        self._parts.clear()
        return moved

    def _copies(self) -> dict[int, str | None]:
        if self._there is None:
            found = remote.complete_in(self.store)
            self._metrics |= {each.iteration: each.metrics() for each in found} if self.keep.best else {}
            self._there = {each.iteration: each.attempt() for each in found}
        return self._there

    def prune(self) -> None:
        """Delete the copies in the store that the rule `keep` does not keep. Raises StoreError.

        The rule is applied to the copies alone: newer checkpoints that are not copied yet must not replace them.
        """
        newest = max(dict(folders.complete(self.root)), default=-1)
        there = [iteration for iteration in self._copies() if iteration <= newest]  # not those of an abandoned branch
        best = self.keep.best
        metric = {each: found[best] for each, found in self._metrics.items() if best is not None and best in found}
        for iteration in set(there) - kept(there, self.keep, metric):
            remote.remove(self.store.below(folders.folder_for(Path(), iteration).name))
            del self._copies()[iteration]


class Uploader:
    """Copies due checkpoints one after the other, and records results and failures in RUN_DIR/events.jsonl."""

    def __init__(self, run_dir: Path, mirror: Mirror) -> None:
        self._run_dir, self._mirror = run_dir, mirror
        self._failing: str | None = None  # the reported reason of a failure that lasts
        self._reported = 0.0
        self._pause = 1.0
        self._moved = 0  # bytes of the attempt that moved any last
        self.success = time.monotonic()

    def turn(self) -> bool:
        """Copy one checkpoint if one is due; return True if none is due. After a failure, pause."""
        began, folder = time.monotonic(), None
        try:
            if (folder := self._mirror.due()) is None:
                self.success = time.monotonic()
                return True
            moved = self._mirror.copy(folder, self._beat)
        except (StoreError, UserError, OSError, ValueError) as error:
            self._fail(folder, str(error))
            return False
        if moved is None:
            return False
        seconds = time.monotonic() - began
        self.success, self._failing, self._pause = time.monotonic(), None, 1.0
        where = f"{self._mirror.store.url}/{folder.name}"
        details = {"iteration": int(folder.name[5:]), "seconds": round(seconds, 3), "bytes": moved, "folder": where}
        events.record(self._run_dir, "upload", **details)  # type: ignore[arg-type]
        _say(f"uploaded {where}: {moved / 1e9:.3f} GB in {seconds:.1f} s")
        try:
            self._mirror.prune()
        except StoreError as error:
            self._fail(None, f"older copies stay: {error}")
        return False

    def _beat(self, moved: int) -> None:
        if moved not in (0, self._moved):  # it is also called while the store does not answer
            self._moved, self.success = moved, time.monotonic()

    def _fail(self, folder: Path | None, reason: str) -> None:
        if folder is not None and not folder.is_dir():
            return  # the run has deleted the checkpoint meanwhile, by --keep-checkpoints
        if reason != self._failing or time.monotonic() - self._reported > _TELL_AGAIN:
            iteration = int(folder.name[5:]) if folder is not None else None
            events.record(self._run_dir, "upload_failed", iteration=iteration, reason=reason)
            what = self._mirror.store.url if folder is None else folder.name
            _say(f"{what} NOT UPLOADED: {reason}. Training goes on, and so do the attempts")
            self._failing, self._reported = reason, time.monotonic()
        time.sleep(self._pause * random.uniform(0.5, 1.5))
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)


def _say(text: str) -> None:
    with suppress(OSError):  # a terminal that was closed, a log on a full disk
        print(text, file=sys.stderr, flush=True)


def main() -> None:
    """Read the job, a line of JSON on stdin, and upload until stdin ends or, after FINISH, until all is copied.

    The exit status is 1 if, after FINISH, a checkpoint was damaged or nothing succeeded for GIVE_UP seconds.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # meant for the rank, which ends this process when it ends
    os.nice(5)  # training comes first
    job = json.loads(sys.stdin.readline())
    finish = threading.Event()
    threading.Thread(target=_end_with, args=(job["parent"],), daemon=True).start()
    threading.Thread(target=_listen, args=(finish,), daemon=True).start()
    run_dir = Path(job["run_dir"])
    mirror = Mirror(run_dir / "checkpoints", Store.at(job["store"]), Keep(**job["keep"]))
    uploader = Uploader(run_dir, mirror)
    while True:
        nothing_due = uploader.turn()
        if finish.is_set() and nothing_due:
            os._exit(1 if mirror.refused else 0)
        if finish.is_set() and time.monotonic() - uploader.success > GIVE_UP:
            os._exit(1)
        if nothing_due:
            finish.wait(_LOOK)


def _listen(finish: threading.Event) -> None:
    """Set `finish` on FINISH, and exit when stdin ends: the next run's uploader copies what is incomplete."""
    for line in sys.stdin:
        if line == FINISH:
            finish.set()
    os._exit(0)


def _end_with(parent: int) -> None:
    """Exit when the run's process has ended: stdin may stay open, as another process may hold its other end."""
    while os.getppid() == parent:
        time.sleep(_LOOK)
    os._exit(0)


if __name__ == "__main__":
    main()
