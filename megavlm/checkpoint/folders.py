"""Find the checkpoint folders of a run that are complete, and make a written one complete. No torch.

A save writes into `tmp-iter_0000100`, its manifest last; renaming the folder to `iter_0000100` is the commit. Whatever
kills the run, a folder `iter_*` with a manifest is whole, and the newest one is where the run resumes.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from megavlm.checkpoint.manifest import FileSum, is_complete, write_manifest
from megavlm.errors import UserError

_COMPLETE = re.compile(r"iter_(\d{7,})")


def folder_for(root: Path, iteration: int) -> Path:
    return root / f"iter_{iteration:07d}"


def temporary_for(root: Path, iteration: int) -> Path:
    return root / f"tmp-iter_{iteration:07d}"


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
    """Return the checkpoint that a command's RUN_OR_CHECKPOINT names: itself, or the newest of a run or `checkpoints/`.

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


def prepare(root: Path, iteration: int) -> Path:
    """Make an empty folder to write a checkpoint into, and return it."""
    temporary = temporary_for(root, iteration)
    if temporary.exists():
        shutil.rmtree(temporary)
    temporary.mkdir(parents=True)
    return temporary


def commit(
    root: Path,
    iteration: int,
    sums: Mapping[str, FileSum] | None = None,
    *,
    temporary: Path | None = None,
    attempt: str | None = None,
) -> Path:
    """Make a written checkpoint complete: flush its files, write its manifest, rename it; return its folder.

    Files whose `sums` are not given are read. `temporary` is the written folder, if it is not the one of `prepare`;
    `attempt` tells this save from others of the iteration.
    """
    temporary, final = temporary or temporary_for(root, iteration), folder_for(root, iteration)
    for path in temporary.rglob("*"):
        _flush(path)
    write_manifest(temporary, sums or {}, attempt=attempt)
    before = final.with_name(f"tmp-before-{final.name}")
    if os.path.lexists(final):  # the same iteration again, after resuming from an older checkpoint by hand
        remove(before)
        final.rename(before)
    rename_flushed(temporary, final)
    with suppress(OSError):  # the checkpoint counts; `retention.sweep` tries again
        remove(before)
    return final


def remove(path: Path) -> None:
    """Delete a folder, or what has its name: of a link, the link alone. It may be missing. Raises OSError."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def set_aside(folder: Path) -> Path:
    """Rename a damaged checkpoint, so that it is neither loaded nor pruned; return its new path."""
    aside = folder.with_name(f"damaged-{folder.name}")
    with suppress(OSError):  # a folder that may not be renamed stays as it is
        if aside.exists():
            shutil.rmtree(aside)
        folder.rename(aside)
        return aside
    return folder


def rename_flushed(temporary: Path, final: Path) -> None:
    """Rename a written folder once all of it is on the disk: after a loss of power, `final` is whole or missing."""
    for path in [*temporary.rglob("*"), temporary]:
        _flush(path)
    temporary.rename(final)
    _flush(final.parent)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
