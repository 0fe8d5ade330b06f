"""Choose which checkpoints are kept, and delete the others unless a process loads them. No torch.

A process that loads a checkpoint holds a shared lock on one of its files. A process that deletes one takes an exclusive
lock first, without waiting. Without locks in the file system (`flock`), a checkpoint may be deleted while it is loaded.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megavlm.checkpoint import folders
from megavlm.checkpoint.manifest import MANIFEST, SUMMARY
from megavlm.paths import read_bytes

_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


@dataclass(frozen=True)
class Keep:
    """The rule of which checkpoints are kept.

    These are the `newest` (0: all), multiples of `every` (0: none), and the best by the metric `best` (None: none), of
    which less is better, or more if `mode` is "max".
    """

    newest: int
    every: int = 0
    best: str | None = None
    mode: Literal["min", "max"] = "min"


def kept(iterations: Sequence[int], rule: Keep, metric: Mapping[int, float] | None = None) -> set[int]:
    """Return the iterations whose checkpoints are kept. `metric` has the values of `rule.best` that are known."""
    if rule.newest == 0:
        return set(iterations)
    chosen = set(sorted(iterations)[-rule.newest :])
    if rule.every:
        chosen |= {each for each in iterations if each % rule.every == 0}
    if rule.best is None or metric is None:
        return chosen
    best = best_of({each: value for each, value in metric.items() if each in iterations}, rule.mode)
    return chosen if best is None else chosen | {best}


def best_of(metric: Mapping[int, float], mode: Literal["min", "max"]) -> int | None:
    """Return the iteration with the best value, the latest of equal ones. None if there is no value but NaN."""
    sign = 1 if mode == "min" else -1
    found = [(sign * value, -each) for each, value in metric.items() if value == value]
    return -min(found)[1] if found else None


def metrics_of(folder: Path) -> dict[str, float]:
    """Return the metrics that a checkpoint's description has; imports have none."""
    try:
        return metrics_in(read_bytes(folder / SUMMARY, at_most=2**24))
    except OSError:
        return {}


def metrics_in(description: bytes) -> dict[str, float]:
    """Return the metrics in a checkpoint's description, `megavlm.json`."""
    try:
        found = json.loads(description)["metrics"]
        return {str(name): float(value) for name, value in found.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}


def doomed(root: Path, rule: Keep) -> list[Path]:
    """Return the checkpoints of a folder that the rule does not keep, oldest first."""
    found = folders.complete(root)
    metric = {}
    if rule.best is not None:
        known = ((iteration, metrics_of(path)) for iteration, path in found)
        metric = {iteration: each[rule.best] for iteration, each in known if rule.best in each}
    keep = kept([iteration for iteration, _ in found], rule, metric)
    return [path for iteration, path in found if iteration not in keep]


def prune(root: Path, rule: Keep) -> list[Path]:
    """Delete the checkpoints that the rule does not keep and nobody loads; return them."""
    return [path for path in doomed(root, rule) if delete(path)]


def sweep(root: Path) -> None:
    """Delete what unfinished saves and deletions left behind."""
    for leftover in root.glob("tmp-*"):
        with suppress(OSError):
            folders.remove(leftover)


def delete(folder: Path) -> bool:
    """Delete a checkpoint; return whether it is gone: nothing is deleted while somebody loads it."""
    file = _lock_file(folder)
    if file is None:
        return False
    try:
        with suppress_no_locks():
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Renamed first: a kill in the middle of deleting must not leave half a folder that looks complete.
        gone = folder.with_name(f"tmp-{folder.name}")
        folders.remove(gone)
        folder.rename(gone)
        folders.remove(gone)
    except BlockingIOError:
        return False
    finally:
        os.close(file)
    return True


class Holds:
    """The checkpoints that this process reads or may read soon: while it holds them, nobody deletes them."""

    def __init__(self) -> None:
        self._files: list[int] = []

    def add(self, folder: Path) -> bool:
        """Hold a checkpoint; return False where it is gone. Waits for one that is being deleted."""
        file = _lock_file(folder, writable=False)
        if file is None:
            return folder.is_dir()  # it has nothing to hold it by: whoever looks closer says so
        with suppress_no_locks():
            fcntl.flock(file, fcntl.LOCK_SH)
        self._files.append(file)
        return folder.is_dir()

    def release(self) -> None:
        """Release all checkpoints: other processes may delete them."""
        while self._files:
            os.close(self._files.pop())


def _lock_file(folder: Path, *, writable: bool = True) -> int | None:
    for name in (MANIFEST, SUMMARY):
        for mode in (os.O_RDWR, os.O_RDONLY) if writable else (os.O_RDONLY,):  # NFS wants to write to lock alone
            with suppress(OSError):
                return os.open(folder / name, mode | os.O_NONBLOCK | os.O_CLOEXEC)
    return None


class suppress_no_locks:
    """Ignores the errors of a file system that has no locks."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> bool:
        return isinstance(error, OSError) and error.errno in _NO_LOCKS
