"""Let only one run write to a run folder: RUN_DIR/lock names the host and process that write there.

On one machine, and where a shared file system supports it, the kernel holds the lock and frees it when the process
ends. Where a file system does not pass locks on, the owner touches the file every few seconds: a lock that is not
touched for a while belongs to a dead run.
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO

from megavlm.errors import UserError
from megavlm.files import open_to_append, unwritable
from megavlm.json_files import read_own
from megavlm.program import started_as
from megavlm.resilience.events import record

FILE = "lock"
_BEAT = 5.0  # seconds between two touches
_SILENCE = 20.0  # seconds without a touch after which the owner is dead


class RunLock:
    """The lock of a run folder. Rank 0 acquires it before the run writes to the folder."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._file: BinaryIO | None = None
        self._released = threading.Event()
        self._on_loss: Callable[[str], object] = _say

    def when_lost(self, act: Callable[[str], object]) -> None:
        """Call `act` with a line once the lock is no longer in the folder, which was removed or renamed."""
        self._on_loss = act

    def acquire(self) -> None:
        """Acquire the lock, or take it over from a dead run. Raises UserError if a living run holds it."""
        path = self._run_dir / FILE
        try:
            opened = open_to_append(path)
        except OSError as error:
            raise unwritable(self._run_dir, error) from error
        file = opened.fileno()
        try:
            kernel_holds = _lock(file)
            owner = _owner(file)
            if owner and _is_alive(path, owner, kernel_holds=kernel_holds):
                raise BlockingIOError
            _lock(file)  # once more: looking at the file gave the kernel's lock away
        except BlockingIOError as error:
            owner = _owner(file)
            opened.close()
            raise UserError(
                f"--run-dir {self._run_dir} belongs to a run that is alive (process {owner.get('pid')} on "
                f"{owner.get('host')}, since {owner.get('since')}): stop it, or give another --run-dir"
            ) from error
        try:
            me = {"host": platform.node(), "machine": _boot(), "pid": os.getpid()}
            me["since"] = datetime.now(UTC).isoformat(timespec="seconds")
            _write(file, me)
        except OSError as error:
            opened.close()
            raise UserError(f"{path} cannot be written ({error.strerror}): choose another --run-dir") from error
        self._file = opened
        threading.Thread(target=self._beat, args=(me, file), name="lock", daemon=True).start()
        if owner:
            record(self._run_dir, "takeover", reason=f"process {owner.get('pid')} on {owner.get('host')} is dead")

    def release(self) -> None:
        """Release the lock. A lock that was not acquired stays as it is."""
        self._released.set()
        if self._file is not None:
            self._file.truncate(0)  # not deleted: another run may have opened it
            self._file.close()
            self._file = None

    def _beat(self, me: dict[str, Any], file: int) -> None:
        path, reported = self._run_dir / FILE, False
        while not self._released.wait(_BEAT):
            is_there = _is_at(file, path)
            owner = _owner(file) if is_there else read_own(path)
            if owner and owner != me:
                # This process was suspended for so long that a run on another machine took the folder over, or the
                # folder was renamed and another run has begun in its place.
                _say(f"{self._run_dir} now belongs to process {owner.get('pid')} on {owner.get('host')}: this run ends")
                os._exit(1)
            if not is_there and not reported:
                reported = True
                self._on_loss(f"{path} is gone: the folder was removed or renamed")
            with suppress(OSError):  # a file system that is read-only or away may come back
                os.utime(file)


def silent_since(run_dir: Path) -> float | None:
    """Return when a run last touched its folder's lock (Unix time); None if less than a minute ago or without a lock.

    A run that is killed does not touch it again. The clocks of a file server and of this machine may differ by seconds.
    """
    try:
        touched = (run_dir / FILE).stat().st_mtime
    except OSError:
        return None
    return touched if time.time() - touched > 3 * _SILENCE else None


def _lock(file: int) -> bool:
    """Take the kernel's lock; return False on a file system without locks. Raises BlockingIOError if another has it.

    The lock belongs to this process and ends with it; a lock of flock would be inherited by the child that a save
    forks. The lock is lost when the process closes any descriptor of the file.
    """
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError) as error:
        raise BlockingIOError from error
    except OSError:
        return False
    return True


def _is_at(file: int, path: Path) -> bool:
    """Return whether a path leads to an open file; True if unknown. No file is opened: see `_lock`."""
    try:
        return os.path.samestat(os.fstat(file), os.stat(path))
    except FileNotFoundError:
        return False
    except OSError:
        return True


def _say(line: str) -> None:
    print(f"{started_as('train')}: {line}", file=sys.stderr, flush=True)


def _is_alive(path: Path, owner: dict[str, Any], *, kernel_holds: bool) -> bool:
    """Return whether the process in the lock file is alive; where the kernel's lock does not tell, wait for a touch."""
    if kernel_holds and owner.get("machine") == _boot():
        return False
    before = _touched(path)
    end = time.monotonic() + _SILENCE
    while time.monotonic() < end:
        time.sleep(0.5)
        if _touched(path) != before:
            return True
    return False


def _touched(path: Path) -> int:
    """Return when the owner touched the lock. The file is reopened, so that a network file system asks its server."""
    file = os.open(path, os.O_RDONLY)
    try:
        return os.fstat(file).st_mtime_ns
    finally:
        os.close(file)


def _boot() -> str:
    """Return a name of this machine since its last start; machines may share a host name."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return platform.node()


def _owner(file: int) -> dict[str, Any]:
    """Return the owner recorded in a lock file; {} for a released lock."""
    try:
        owner = json.loads(os.pread(file, 65536, 0) or b"{}")
    except (OSError, ValueError, RecursionError):
        return {}
    return owner if isinstance(owner, dict) else {}


def _write(file: int, owner: dict[str, Any]) -> None:
    os.ftruncate(file, 0)
    os.write(file, json.dumps(owner).encode() + b"\n")
