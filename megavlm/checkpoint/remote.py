"""Copy checkpoints to and from a store, and find those in it. No torch.

A checkpoint in a store is a folder like one on a disk. Stores cannot rename, so the manifest is written last and
deleted first: a folder without it is no checkpoint, whatever kills the one who writes or deletes.
"""

from __future__ import annotations

import re
import shutil
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

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
    """A file in a store is not what the manifest beside it says."""


@dataclass(frozen=True)
class RemoteCheckpoint:
    """A folder of a store that is named like a checkpoint."""

    iteration: int
    name: str
    folder: Store
    files: Mapping[str, int]  # sizes

    def __str__(self) -> str:
        return self.folder.url

    @property
    def is_complete(self) -> bool:
        return MANIFEST in self.files

    def sums(self) -> dict[str, FileSum]:
        """Return what the manifest says of the files. Raises StoreError, or ValueError for a damaged manifest."""
        return manifest.sums_in(self.folder.read(MANIFEST, at_most=LARGEST))


def place_of(url: str) -> tuple[Store, str | None]:
    """Return the store of checkpoints that a URL names, a run or its checkpoints, and the name if it names one of them.

    Raises UserError for a URL that cannot be opened, and StoreError.
    """
    parent, _, name = url.rstrip("/").rpartition("/")
    if _NAME.fullmatch(name):
        return Store.at(parent), name
    store = Store.at(url)
    below = store.below("checkpoints")
    return (below if found_in(below) else store), None


def found_in(store: Store) -> list[RemoteCheckpoint]:
    """Return what is named like a checkpoint in a store, oldest first. Raises StoreError."""
    files: dict[str, dict[str, int]] = {}
    for path, size in store.files().items():
        name, _, rest = path.partition("/")
        if _NAME.fullmatch(name) and rest:
            files.setdefault(name, {})[rest] = size
    found = [RemoteCheckpoint(int(name[5:]), name, store.below(name), each) for name, each in files.items()]
    return sorted(found, key=lambda each: each.iteration)


def complete_in(store: Store) -> list[RemoteCheckpoint]:
    """Return the checkpoints in a store that have a manifest, oldest first. Raises StoreError."""
    return [each for each in found_in(store) if each.is_complete]


def first_look(remote: RemoteCheckpoint) -> str | None:
    """Return what the manifest and the sizes of files show to be wrong, None if nothing. Raises StoreError."""
    if not remote.is_complete:
        return f"it has no {MANIFEST}: it was not written to its end"
    try:
        sums = remote.sums()
    except ValueError as error:
        return str(error)
    if SUMMARY not in sums:
        return f"its {MANIFEST} does not list {SUMMARY}"
    for name, expected in sums.items():
        if name not in remote.files:
            return f"{name} is missing"
        if remote.files[name] != expected.bytes:
            return f"{name} has {remote.files[name]:,} bytes, not {expected.bytes:,}"
    return None


def upload(folder: Path, store: Store, *, done: set[str], go_on: GoOn = _nothing) -> int:
    """Copy a complete checkpoint of this machine into a store, its manifest last; return the bytes that moved.

    `done` names the files that an earlier call has copied, and grows. Raises StoreError, and UserError for a file that
    is not what was saved.
    """
    clear(folder, store, done=done)
    moved = send(folder, store, manifest.read_manifest(folder), done=done, go_on=go_on)
    complete(folder, store, done=done)
    return moved


def clear(folder: Path, store: Store, *, done: set[str]) -> None:
    """Delete what another save of the iteration left in a store, unless files of this one are `done`."""
    target = store.below(folder.name)
    if not done and target.files():
        remove(target)


def send(folder: Path, store: Store, names: Iterable[str], *, done: set[str], go_on: GoOn = _nothing) -> int:
    """Copy those of the files of a checkpoint that are not `done`; return the bytes. Raises StoreError, UserError."""
    sums, target = manifest.read_manifest(folder), store.below(folder.name)

    def send_one(name: str, moved: Moved) -> None:
        if problem := manifest.damage(folder, [name]):
            raise UserError(f"{folder} is damaged: {problem}")
        target.upload(folder / name, name, moved)
        done.add(name)

    return move(_largest_first(sums, set(names) - done), send_one, go_on=go_on)


def complete(folder: Path, store: Store, *, done: set[str]) -> None:
    """Write the manifest of a checkpoint of which all files are in a store. Raises StoreError if one is missing.

    `done` then names those that are there.
    """
    content, target = (folder / MANIFEST).read_bytes(), store.below(folder.name)
    sums, there = manifest.sums_in(content), target.files()
    done.clear()
    done.update(name for name, expected in sums.items() if there.get(name) == expected.bytes)
    if missing := sorted(sums.keys() - done):
        raise StoreError(f"{target.url}/{missing[0]} has {there.get(missing[0])} bytes after it was written")
    target.write(MANIFEST, content)
    if target.read(MANIFEST, at_most=LARGEST) != content:
        raise StoreError(f"{target.url}/{MANIFEST} does not read back as it was written")


def download(
    remote: RemoteCheckpoint, root: Path, names: Iterable[str], sums: Mapping[str, FileSum], *, go_on: GoOn = _nothing
) -> int:
    """Copy files of a checkpoint into a temporary folder below `root`; return the bytes that moved.

    Each is compared with its sum, and those that are there already are not copied again. Raises DamagedInStore for one
    that is not as it was written whenever it is read, and other StoreErrors.
    """
    into = temporary_for(root, remote.name)

    def fetch(name: str, moved: Moved) -> None:
        if _is_whole(into / name, sums[name]):
            return
        remote.folder.download(name, into / name, moved)
        if not _is_whole(into / name, sums[name]):
            raise DamagedInStore(f"{remote.folder.url}/{name} is damaged: its size or checksum is not what was saved")

    return move(_largest_first(sums, names), fetch, go_on=go_on)


def commit_download(remote: RemoteCheckpoint, root: Path) -> Path:
    """Make a checkpoint of the files that were downloaded; return its folder. Raises StoreError if any is missing."""
    temporary, final = temporary_for(root, remote.name), root / remote.name
    remote.folder.download(MANIFEST, temporary / MANIFEST)
    if problem := manifest.first_look(temporary):
        shutil.rmtree(temporary, ignore_errors=True)
        raise DamagedInStore(f"{remote.folder.url} is damaged: {problem}")
    if final.exists():  # it is damaged, since another one was asked for
        folders.set_aside(final)
    folders.rename_flushed(temporary, final)
    return final


def temporary_for(root: Path, name: str) -> Path:
    return root / f"tmp-download-{name}"


def share(sums: Mapping[str, FileSum], *, rank: int, world: int) -> list[str]:
    """Return the files that one of `world` ranks copies, so that all copy about as many bytes."""
    shares: list[list[str]] = [[] for _ in range(world)]
    loads = [0] * world
    for name in _largest_first(sums, sums):
        to = min(range(world), key=loads.__getitem__)
        shares[to].append(name)
        loads[to] += sums[name].bytes
    return shares[rank]


def damage(remote: RemoteCheckpoint) -> str | None:
    """Read all files of a checkpoint in a store and return what is wrong; None if nothing is. Raises StoreError."""
    if problem := first_look(remote):
        return problem
    found: dict[str, str] = {}

    def read(name: str, moved: Moved) -> None:
        crc = 0
        for piece in remote.folder.pieces(name):
            crc = zlib.crc32(piece, crc)
            moved(len(piece))
        if crc != sums[name].crc32:
            found[name] = f"{name} is damaged: its checksum is {crc:08x}, not {sums[name].crc32:08x}"

    sums = remote.sums()
    move(_largest_first(sums, sums), read)
    return found[min(found)] if found else None


def remove(folder: Store) -> None:
    """Delete a checkpoint from a store, its manifest first. Raises StoreError."""
    folder.remove(MANIFEST)
    folder.remove_all()


def _is_whole(path: Path, expected: FileSum) -> bool:
    try:
        return path.stat().st_size == expected.bytes and manifest.sum_of(path) == expected
    except OSError:
        return False


def _largest_first(sums: Mapping[str, FileSum], names: Iterable[str]) -> Sequence[str]:
    return sorted(names, key=lambda name: (-sums[name].bytes, name))
