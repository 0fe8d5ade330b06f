"""Find, commit, lock and delete the checkpoint folders of a run. No torch.

A save writes into `tmp-iter_0000100`, its manifest last; renaming the folder to `iter_0000100` is the commit. Whatever
kills the run, a folder `iter_*` with a manifest is whole, and the newest one is where the run resumes.

A process that loads a checkpoint holds a shared lock on one of its files. A process that deletes a checkpoint takes an
exclusive lock first, without waiting. If the file system has no locks (`flock`), a checkpoint may be deleted while it
is loaded.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
from collections.abc import Collection, Container, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megavlm.checkpoint.manifest import MANIFEST, SUMMARY, FileSum, is_complete, write_manifest
from megavlm.errors import UserError
from megavlm.paths import read_bytes

_COMPLETE = re.compile(r"iter_(\d{7,})")
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
_NO_RENAMES = (errno.EMFILE, errno.EOPNOTSUPP, errno.ENOSYS)  # of a folder: gcsfuse gives the first


def folder_for(root: Path, iteration: int) -> Path:
    return root / f"iter_{iteration:07d}"


def checkpoints(root: Path) -> list[tuple[int, Path]]:
    """Return the folders named like checkpoints as (iteration, folder), oldest first."""
    if not root.is_dir():
        return []
    found = ((_COMPLETE.fullmatch(path.name), path) for path in root.iterdir() if path.is_dir())
    return sorted((int(match[1]), path) for match, path in found if match)


def complete(root: Path) -> list[tuple[int, Path]]:
    """Return the complete checkpoints as (iteration, folder), oldest first."""
    return [(iteration, path) for iteration, path in checkpoints(root) if is_complete(path)]


def newest(root: Path) -> Path | None:
    """Return the newest complete checkpoint, from which a run resumes; None if there is none."""
    folders = complete(root)
    return folders[-1][1] if folders else None


def is_checkpoint(path: Path) -> bool:
    """Return whether a folder is named like a checkpoint."""
    return bool(_COMPLETE.fullmatch(path.name)) and path.is_dir()


def resolve(path: Path) -> Path:
    """Return the checkpoint that a command's RUN_OR_CHECKPOINT names: itself, or the newest one in a run's folder.

    Raises UserError if there is none.
    """
    if is_checkpoint(path):
        return path
    found = newest(path / "checkpoints") or newest(path)
    if found is None:
        lacks = "holds no complete checkpoint" if path.is_dir() else "is no folder"
        raise UserError(
            f"RUN_OR_CHECKPOINT {path} {lacks}: name a run folder that has saved, or one of its iter_* folders"
        )
    return found


def commit(temporary: Path, final: Path, sums: Mapping[str, FileSum], *, attempt: str | None) -> None:
    """Commit a written checkpoint: write its manifest, flush its files, rename the folder to `final`.

    Files in `sums` have been flushed by their writers; other files are read for their sums. `attempt` distinguishes
    this save from other saves of the iteration.
    """
    write_manifest(temporary, sums, attempt=attempt)
    before = final.with_name(f"tmp-before-{final.name}")
    if os.path.lexists(final):  # the same iteration again, after resuming from an older checkpoint by hand
        remove(before)
        move(final, before)
    rename_flushed(temporary, final, flushed=sums)
    with suppress(OSError):  # the checkpoint is committed; `sweep` tries again
        remove(before)


def remove(path: Path) -> None:
    """Delete a folder or a file, if it exists; for a link, delete the link alone. Raises OSError."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def set_aside(folder: Path) -> Path:
    """Rename a damaged checkpoint, so that it is neither loaded nor pruned; return its new path.

    If the folder cannot be renamed, return `folder`.
    """
    aside = folder.with_name(f"damaged-{folder.name}")
    with suppress(OSError):  # a folder that may not be renamed stays as it is
        if aside.exists():
            shutil.rmtree(aside)
        move(folder, aside)
        return aside
    return folder


def rename_flushed(temporary: Path, final: Path, *, flushed: Container[str] = ()) -> None:
    """Flush all files of a written folder, then rename it: after a loss of power, `final` is whole or missing.

    The files of the folder that are named in `flushed` are on the disk already.
    """
    for folder, _, names in os.walk(temporary, topdown=False):
        for name in names:
            if folder != str(temporary) or name not in flushed:
                _flush(Path(folder, name))
        _flush(Path(folder))
    move(temporary, final)
    _flush(final.parent)


def move(folder: Path, target: Path) -> None:
    """Rename a folder. In a file system that renames files alone, move its files, and the manifest last."""
    try:
        folder.rename(target)
    except OSError as error:
        if error.errno not in _NO_RENAMES:
            raise
        for path in sorted(folder.rglob("*"), key=lambda path: path.name == MANIFEST):
            (target / path.relative_to(folder)).parent.mkdir(parents=True, exist_ok=True)
            if path.is_file():
                path.rename(target / path.relative_to(folder))
        remove(folder)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@dataclass(frozen=True)
class Keep:
    """Rule that says which checkpoints of a run are kept.

    These are the `newest` (0: all), multiples of `every` (0: none), and the best one by the metric `best` (None: none).
    The best value is the least one, or the greatest if `mode` is "max".
    """

    newest: int
    every: int = 0
    best: str | None = None
    mode: Literal["min", "max"] = "min"


def kept(iterations: Collection[int], rule: Keep, metric: Mapping[int, float] | None = None) -> set[int]:
    """Return the iterations whose checkpoints the rule keeps. `metric` has the known values of `rule.best`."""
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
    """Return the iteration with the best value, the latest if values are equal; None if all values are NaN."""
    sign = 1 if mode == "min" else -1
    found = [(sign * value, -each) for each, value in metric.items() if value == value]
    return -min(found)[1] if found else None


def metrics_of(folder: Path) -> dict[str, float]:
    """Return the metrics in a checkpoint's description, `megavlm.json`; {} if it has none, as after an import."""
    try:
        return metrics_in(read_bytes(folder / SUMMARY, at_most=2**24))
    except OSError:
        return {}


def metrics_in(description: bytes) -> dict[str, float]:
    """Return the metrics in the content of a checkpoint's `megavlm.json`; {} if it has none or is damaged."""
    try:
        found = json.loads(description)["metrics"]
        return {str(name): float(value) for name, value in found.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}


def doomed(root: Path, rule: Keep) -> list[Path]:
    """Return the complete checkpoints of a folder that the rule does not keep, oldest first."""
    found = complete(root)
    metric = {}
    if rule.best is not None:
        known = ((iteration, metrics_of(path)) for iteration, path in found)
        metric = {iteration: each[rule.best] for iteration, each in known if rule.best in each}
    keep = kept([iteration for iteration, _ in found], rule, metric)
    return [path for iteration, path in found if iteration not in keep]


def prune(root: Path, rule: Keep) -> list[Path]:
    """Delete the checkpoints that the rule does not keep and no process loads; return the deleted ones."""
    return [path for path in doomed(root, rule) if delete(path)]


def sweep(root: Path, *, attempt: str | None = None) -> None:
    """Delete the remains of unfinished saves and deletions, except those of the save `attempt`, which is under way."""
    for leftover in root.glob("tmp-*"):
        if attempt is None or not leftover.name.endswith(f"-{attempt}"):
            with suppress(OSError):
                remove(leftover)


def delete(folder: Path) -> bool:
    """Delete a checkpoint unless a process loads it; return whether it was deleted."""
    file = _lock_file(folder)
    if file is None:
        return False
    gone = folder.with_name(f"tmp-{folder.name}")
    try:
        with _where_there_are_locks():
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Renamed first: a kill in the middle of deleting must not leave half a folder that looks complete.
        remove(gone)
        folder.rename(gone)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_RENAMES:
            raise
        gone = folder
        (folder / MANIFEST).unlink(missing_ok=True)
    finally:
        os.close(file)
    remove(gone)  # with none of its files open: NFS keeps such a file, and refuses to delete its folder
    return True


class Holds:
    """Shared locks on the checkpoints that this process reads or may read soon; no process deletes them meanwhile."""

    def __init__(self) -> None:
        self._files: list[int] = []

    def add(self, folder: Path) -> bool:
        """Lock a checkpoint; return False if it was deleted. Waits for a deletion that is under way."""
        file = _lock_file(folder, writable=False)
        if file is None:
            return folder.is_dir()  # no file to lock: a later check of the folder reports that
        with _where_there_are_locks():
            fcntl.flock(file, fcntl.LOCK_SH)
        self._files.append(file)
        return folder.is_dir()

    def release(self) -> None:
        """Release all locks: other processes may delete the checkpoints."""
        while self._files:
            os.close(self._files.pop())


def _lock_file(folder: Path, *, writable: bool = True) -> int | None:
    for name in (MANIFEST, SUMMARY):
        for mode in (os.O_RDWR, os.O_RDONLY) if writable else (os.O_RDONLY,):  # NFS wants to write to lock alone
            with suppress(OSError):
                return os.open(folder / name, mode | os.O_NONBLOCK | os.O_CLOEXEC)
    return None


@contextmanager
def _where_there_are_locks() -> Iterator[None]:
    """Ignore errors of `flock` in a file system that has no locks."""
    try:
        yield
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
