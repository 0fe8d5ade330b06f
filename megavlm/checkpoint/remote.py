"""Upload checkpoints to a store, download them, and list the checkpoints in a store. No torch.

A checkpoint in a store has the same files as a checkpoint on a disk, and a disk can be a store. Stores cannot rename,
so the manifest is written last and deleted first: a folder without a manifest is no checkpoint, even after a process
was killed while it wrote or deleted the folder.
"""

from __future__ import annotations

import json
import re
import shutil
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from megavlm.checkpoint import folders, manifest
from megavlm.checkpoint.manifest import LARGEST, MANIFEST, SUMMARY, FileSum
from megavlm.errors import UserError
from megavlm.storage.store import Moved, Store, StoreError
from megavlm.storage.transfer import move

_NAME = re.compile(r"iter_(\d{7,})")
GoOn = Callable[[int], None]  # is called about once a second with the bytes that have moved


def _nothing(moved: int) -> None:
    pass


class DamagedInStore(StoreError):
    """Raised if a file in a store differs in size or checksum from the checkpoint's manifest."""


@dataclass(frozen=True)
class StoredCheckpoint:
    """A folder in a store that is named like a checkpoint; it may be incomplete."""

    iteration: int
    name: str
    folder: Store
    files: Mapping[str, int]  # sizes

    def __str__(self) -> str:
        return self.folder.url

    @property
    def is_complete(self) -> bool:
        return MANIFEST in self.files

    @property
    def bytes(self) -> int:
        return sum(self.files.values())

    @property
    def saved(self) -> datetime:
        """Return the time at which the checkpoint was saved, in local time. Raises StoreError."""
        return self.folder.modified(MANIFEST if self.is_complete else min(self.files)).astimezone()

    def sums(self) -> dict[str, FileSum]:
        """Return each file's size and checksum in the manifest. Raises StoreError, or ValueError if it is damaged."""
        return manifest.sums_in(self.folder.read(MANIFEST, at_most=LARGEST))

    def attempt(self) -> str | None:
        """Return the name of the save that wrote the checkpoint; None if it is unknown. Raises StoreError."""
        return manifest.attempt_in(self.folder.read(MANIFEST, at_most=LARGEST))

    def summary(self) -> dict[str, Any]:
        """Return the content of the checkpoint's `megavlm.json`. Raises UserError if it cannot be read."""
        try:
            summary = json.loads(self.folder.read(SUMMARY, at_most=2**24))
            if not isinstance(summary, dict):
                raise ValueError("it is no JSON object")
        except (StoreError, ValueError, RecursionError) as error:
            raise UserError(f"{self}: {SUMMARY} cannot be read ({error})") from error
        return summary

    def metrics(self) -> dict[str, float]:
        """Return the metrics in the checkpoint's `megavlm.json`; {} if it has none. Raises StoreError."""
        there = SUMMARY in self.files
        return folders.metrics_in(self.folder.read(SUMMARY, at_most=2**24)) if there else {}


def place_of(url: str) -> tuple[Store, str | None]:
    """Return (store of checkpoints, checkpoint name or None) for the URL of a run, of its checkpoints, or of one of
    them.

    Raises UserError for a URL that cannot be opened, and StoreError.
    """
    parent, _, name = url.rstrip("/").rpartition("/")
    if _NAME.fullmatch(name):
        return Store.at(parent), name
    store = Store.at(url)
    below = store.below("checkpoints")
    return (below if found_in(below) else store), None


def checkpoints_at(place: str) -> list[StoredCheckpoint]:
    """Return the checkpoints at a path or URL: one, or all of a run, oldest first. Raises UserError if none."""
    store, only = place_of(place)
    if found := [each for each in found_in(store) if only in (None, each.name)]:
        return found
    raise UserError(f"{place} holds no checkpoints: give a run folder or URL, its checkpoints, or one of them")


def best_of(found: Sequence[StoredCheckpoint]) -> int | None:
    """Return the iteration of a run's best checkpoint by the metric of `--keep-best`; None without that option."""
    try:
        name, mode = found[-1].summary()["keep_best"]
    except (UserError, LookupError, TypeError, ValueError):
        return None
    metrics = ((each.iteration, each.metrics()) for each in found)
    return folders.best_of({iteration: values[name] for iteration, values in metrics if name in values}, mode)


def found_in(store: Store) -> list[StoredCheckpoint]:
    """Return the folders in a store that are named like checkpoints, oldest first. Raises StoreError."""
    files: dict[str, dict[str, int]] = {}
    for path, size in store.files().items():
        name, _, rest = path.partition("/")
        if _NAME.fullmatch(name) and rest:
            files.setdefault(name, {})[rest] = size
    found = [StoredCheckpoint(int(name[5:]), name, store.below(name), each) for name, each in files.items()]
    return sorted(found, key=lambda each: each.iteration)


def complete_in(store: Store) -> list[StoredCheckpoint]:
    """Return the checkpoints in a store that have a manifest, oldest first. Raises StoreError."""
    return [each for each in found_in(store) if each.is_complete]


def first_look(stored: StoredCheckpoint) -> str | None:
    """Check a checkpoint's manifest and file sizes; return the first problem or None. Raises StoreError."""
    if not stored.is_complete:
        return f"it has no {MANIFEST}: it was not written to its end"
    try:
        return manifest.misfit(stored.sums(), stored.files)
    except ValueError as error:
        return str(error)


def upload(folder: Path, store: Store, *, done: set[str], go_on: GoOn = _nothing) -> int:
    """Upload a complete checkpoint to a store, its manifest last; return the number of bytes moved.

    `done` names the files that earlier calls have copied, and is extended; if it is empty, files of another save of
    the iteration are deleted first. Raises StoreError, and UserError for a damaged file.
    """
    content, target = (folder / MANIFEST).read_bytes(), store.below(folder.name)
    sums = manifest.sums_in(content)
    if not done and target.files():
        remove(target)

    def send(name: str, moved: Moved) -> None:
        if problem := manifest.damage(folder, [name], partial(moved, 0)):  # a slow disk is no store that is silent
            raise UserError(f"{folder} is damaged: {problem}")
        target.upload(folder / name, name, moved)
        done.add(name)

    total = move(_largest_first(sums, sums.keys() - done), send, go_on=go_on)
    there = target.files()
    if missing := sorted(name for name, expected in sums.items() if there.get(name) != expected.bytes):
        done.difference_update(missing)
        raise StoreError(f"{target.url}/{missing[0]} has {there.get(missing[0])} bytes after it was written")
    target.write(MANIFEST, content)
    if target.read(MANIFEST, at_most=LARGEST) != content:
        raise StoreError(f"{target.url}/{MANIFEST} does not read back as it was written")
    return total


def download(
    stored: StoredCheckpoint, root: Path, names: Iterable[str], sums: Mapping[str, FileSum], *, go_on: GoOn = _nothing
) -> int:
    """Download files of a checkpoint into a temporary folder below `root`; return the number of bytes moved.

    Each file is compared with its sum, and files that are complete already are not copied again. Raises DamagedInStore
    for a file whose size or checksum is wrong after the download, and other StoreErrors.
    """
    into = temporary_for(root, stored.name)

    def fetch(name: str, moved: Moved) -> None:
        if _is_whole(into / name, sums[name], moved):
            return
        stored.folder.download(name, into / name, moved)
        if not _is_whole(into / name, sums[name], moved):
            raise DamagedInStore(f"{stored.folder.url}/{name} is damaged: its size or checksum is not what was saved")

    return move(_largest_first(sums, names), fetch, go_on=go_on)


def commit_download(stored: StoredCheckpoint, root: Path) -> Path:
    """Commit a download as a checkpoint; return its folder. Raises StoreError for a missing or damaged file."""
    temporary, final = temporary_for(root, stored.name), root / stored.name
    stored.folder.download(MANIFEST, temporary / MANIFEST)
    if problem := manifest.first_look(temporary):
        shutil.rmtree(temporary, ignore_errors=True)
        raise DamagedInStore(f"{stored.folder.url} is damaged: {problem}")
    if final.exists():  # it is damaged, since another one was asked for
        folders.set_aside(final)
    folders.rename_flushed(temporary, final)
    return final


def temporary_for(root: Path, name: str) -> Path:
    return root / f"tmp-download-{name}"


def share(sums: Mapping[str, FileSum], *, rank: int, world: int) -> list[str]:
    """Return the files that `rank` of `world` ranks copies, so that all ranks copy about the same number of bytes."""
    return list(_largest_first(sums, sums)[rank::world])


def damage(stored: StoredCheckpoint) -> str | None:
    """Read all files of a checkpoint in a store and return a problem; None if there is none. Raises StoreError."""
    if problem := first_look(stored):
        return problem
    found: dict[str, str] = {}

    def read(name: str, moved: Moved) -> None:
        crc = 0
        for piece in stored.folder.pieces(name):
            crc = zlib.crc32(piece, crc)
            moved(len(piece))
        if crc != sums[name].crc32:
            found[name] = f"{name} is damaged: its checksum is {crc:08x}, not {sums[name].crc32:08x}"

    sums = stored.sums()
    move(_largest_first(sums, sums), read)
    return found[min(found)] if found else None


def remove(folder: Store) -> None:
    """Delete a checkpoint from a store, its manifest first. Raises StoreError."""
    folder.remove(MANIFEST)
    folder.remove_all()


def _is_whole(path: Path, expected: FileSum, moved: Moved) -> bool:
    try:
        return path.stat().st_size == expected.bytes and manifest.sum_of(path, partial(moved, 0)) == expected
    except OSError:
        return False


def _largest_first(sums: Mapping[str, FileSum], names: Iterable[str]) -> Sequence[str]:
    return sorted(names, key=lambda name: (-sums[name].bytes, name))
