"""List, verify, describe and copy checkpoints for `tools/checkpoint.py`. No torch."""

from __future__ import annotations

import json
import shutil
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

from megavlm.checkpoint import folders, manifest, retention
from megavlm.checkpoint.manifest import MANIFEST, SUMMARY, FileSum
from megavlm.checkpoint.retention import Holds, Keep, best_of, metrics_of
from megavlm.errors import UserError
from megavlm.files import open_new
from megavlm.paths import open_regular, read_bytes

Named = TypeVar("Named")
_PIECE = 4 * 2**20  # bytes


@dataclass(frozen=True)
class Entry:
    """What a list of checkpoints says of one of them."""

    name: str
    iteration: int
    bytes: int
    saved: datetime
    metrics: Mapping[str, float]  # of its iteration
    is_best: bool  # by the rule of its run (--keep-best)
    state: str  # "whole", as far as a moment tells, or what is wrong


def root_of(path: Path) -> Path:
    """Return the folder of checkpoints of a path: a run or that folder itself. Raises UserError if it has none."""
    for root in (path / "checkpoints", path):
        if folders.checkpoints(root):
            return root
    raise UserError(f"{path} holds no checkpoints: give a run folder or its checkpoints folder")


def checkpoints_of(path: Path) -> list[Path]:
    """Return the checkpoints that a path names: itself, or all of a run, oldest first."""
    return [path] if folders.is_checkpoint(path) else [folder for _, folder in folders.checkpoints(root_of(path))]


def entries(path: Path) -> Iterator[Entry]:
    """Yield the checkpoints of a run, oldest first."""
    found = folders.checkpoints(root_of(path))
    metrics = {iteration: metrics_of(folder) for iteration, folder in found}
    best = best_by(found[-1][1], metrics, summary_of)
    for iteration, folder in found:
        state = manifest.first_look(folder) or "whole"
        sizes = [file.stat().st_size for file in folder.rglob("*") if file.is_file()]
        saved = datetime.fromtimestamp(folder.stat().st_mtime)
        yield Entry(folder.name, iteration, sum(sizes), saved, metrics[iteration], iteration == best, state)


def best_by(
    newest: Named, metrics: Mapping[int, Mapping[str, float]], summary_of: Callable[[Named], Mapping[str, Any]]
) -> int | None:
    """Return the iteration of the best checkpoint by the rule that the newest one names; None if there is no rule."""
    try:
        metric, mode = summary_of(newest)["keep_best"]
    except (UserError, KeyError, TypeError, ValueError):
        return None
    known = {iteration: each[metric] for iteration, each in metrics.items() if metric in each}
    return best_of(known, "max" if mode == "max" else "min")


def problem_of(folder: Path) -> str | None:
    """Read all files of a checkpoint and return what is wrong with it; None if nothing is."""
    return manifest.first_look(folder) or manifest.damage(folder)


def summary_of(folder: Path) -> dict[str, Any]:
    """Return a checkpoint's own description, `megavlm.json`. Raises UserError if it cannot be read."""
    try:
        summary = json.loads(read_bytes(folder / SUMMARY, at_most=2**24))
        if not isinstance(summary, dict):
            raise ValueError("it is no JSON object")
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{folder}: {SUMMARY} cannot be read ({error})") from error
    return summary


def doomed(path: Path, rule: Keep) -> list[Path]:
    """Return the checkpoints of a run that the rule does not keep, oldest first."""
    return retention.doomed(root_of(path), rule)


def delete(folder: Path) -> bool:
    """Delete a checkpoint; return whether it is gone: nothing is deleted while somebody loads it."""
    return retention.delete(folder)


def copy(source: Path, to: Path) -> Path:
    """Copy a checkpoint into the folder `to`, and verify each file while it is read and once it is written.

    The copy gets its name when it is whole. Raises UserError for one that is damaged or there already.
    """
    final, temporary = to / source.name, to / f"tmp-{source.name}"
    if final.exists():
        raise UserError(f"{final} is already there: remove it, or copy to another folder")
    holds = Holds()
    try:
        holds.add(source)
        if problem := manifest.first_look(source):
            raise UserError(f"{source} is damaged: {problem}")
        known = manifest.read_manifest(source)
        shutil.rmtree(temporary, ignore_errors=True)
        for file in sorted(path for path in source.rglob("*") if path.is_file()):
            name = file.relative_to(source).as_posix()
            if not file.resolve().is_relative_to(source.resolve()):
                raise UserError(f"{file} is a link that leads out of its checkpoint: nothing was copied")
            read = _copy_file(file, temporary / name)
            if name != MANIFEST and read != known.get(name, read):
                raise UserError(f"{source} is damaged: {name} is not what was saved. Nothing was copied")
            if manifest.sum_of(temporary / name) != read:
                raise UserError(f"{temporary / name} does not read back as it was written: the disk is not sound")
        folders.rename_flushed(temporary, final)
    except (OSError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        words = manifest.in_words(error) if isinstance(error, OSError) else str(error)
        raise UserError(f"{source} cannot be copied to {to}: {words}") from error
    finally:
        holds.release()
        shutil.rmtree(temporary, ignore_errors=True)
    return final


def _copy_file(source: Path, to: Path) -> FileSum:
    to.parent.mkdir(parents=True, exist_ok=True)
    size = crc = 0
    with open_regular(source) as reading, open_new(to) as writing:
        while piece := reading.read(_PIECE):
            writing.write(piece)
            crc = zlib.crc32(piece, crc)
            size += len(piece)
    return FileSum(size, crc)
