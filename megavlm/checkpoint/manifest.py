"""Write and check the manifest of a checkpoint: size and checksum of each of its files. No torch.

The manifest is written last: a folder without a manifest is no checkpoint, whatever its name, since not every file
system renames a folder atomically. Each block of a tensor also has its own checksum (`items.py`), so that a rank can
verify the block without reading the rest of the file.

The checksum of files is CRC-32: it finds every burst of up to 32 wrong bits, and all but one of 4 · 10⁹ other damages.
A storage system is not an attacker, and an attacker who can write a file can write the manifest. So SHA-256 (1.8 GB/s,
CRC-32 4.0 GB/s) would find no more.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from megavlm.errors import UserError
from megavlm.files import replace_file
from megavlm.paths import Escapes, open_regular, plain, read_bytes

MANIFEST = "manifest.json"
SUMMARY = "megavlm.json"  # the description of a checkpoint
LARGEST = 2**24  # bytes of a manifest: 100,000 files
TENSORS = ".distcp"  # suffix of tensor files, which are verified during a load; all other files are verified before it
_LOADED = ("state.json", "metadata.json", "items.json")  # further files that a load reads, with SUMMARY
_PIECE = 2**18  # bytes that are read, written or summed at once: the bytes to sum are still in the core's cache
_FLUSH = 2**26  # bytes of a file after which it waits for the disk: no single wait exhausts a writer's patience
_ROWS, _COLUMNS = 64, 511
BLOCK = 8 * _ROWS * _COLUMNS  # bytes


@dataclass(frozen=True)
class FileSum:
    """Size and CRC-32 of a file."""

    bytes: int
    crc32: int


class FoldedSum:
    """Checksum of an item, eight times as fast as CRC-32, so that a rank can verify each item that it loads.

    An item is cut into blocks of 64 × 511 words of 8 bytes. In each block the words of a column are added, modulo 2⁶⁴,
    and CRC-32 sums up the totals of the columns, which are a 64th of the bytes. As in other checksums that add
    (Fletcher 1982), additions use the widest registers of a processor: one core sums 35 GB/s, and 4.2 GB/s with CRC-32.

    The sum finds a change of one word, since no other word of its column makes up for it; a run of changes of any
    length, unless the changes of each column cancel; exchanged or misplaced pages, because a row is no multiple of a
    page, so that words of two pages meet in other columns. The manifest finds a change of the file's length. The sum
    may miss two words of one column that change by opposite amounts.
    """

    def __init__(self) -> None:
        self._crc = 0
        self._rest = bytearray()  # of a block that is not full

    def update(self, data: memoryview) -> None:
        """Add bytes to the sum; calls with whole blocks are fast."""
        if self._rest:
            missing = BLOCK - len(self._rest)
            self._rest += data[:missing]
            data = data[missing:]
            if len(self._rest) < BLOCK:
                return
            self._crc = _folded(self._rest, self._crc)
            self._rest = bytearray()
        whole = len(data) - len(data) % BLOCK
        for start in range(0, whole, BLOCK):
            self._crc = _folded(data[start : start + BLOCK], self._crc)
        self._rest += data[whole:]

    @property
    def value(self) -> int:
        """Return the sum of the bytes added so far."""
        return _folded(self._rest.ljust(BLOCK, b"\0"), self._crc) if self._rest else self._crc


def _folded(block: memoryview | bytearray, crc: int) -> int:
    words = np.frombuffer(block, dtype="<u8").reshape(_ROWS, _COLUMNS)
    return zlib.crc32(np.add.reduce(words, axis=0), crc)


class SummingFile:
    """Writes to an open file, computes checksums of the written bytes, and flushes to disk every `_FLUSH` bytes."""

    def __init__(self, file: IO[bytes], go_on: Callable[[], None] = lambda: None) -> None:
        """Write to `file`; `go_on` is called before each piece, and an exception from it ends the write."""
        self._file, self._go_on = file, go_on
        self._bytes = self._crc = 0
        self._waiting = 0  # bytes that the disk may not have yet
        self._item = FoldedSum()
        self.error: Exception | None = None  # why the last write ended: torch reports "unexpected pos" in its place

    def write(self, data: bytes | memoryview) -> int:
        whole = memoryview(data).cast("B")
        for start in range(0, len(whole), _PIECE):
            piece = whole[start : start + _PIECE]
            try:
                self._go_on()
                self._file.write(piece)
                self._waiting += len(piece)
                if self._waiting >= _FLUSH:
                    self.finish()
            except Exception as error:
                self.error = error
                raise
            self._crc = zlib.crc32(piece, self._crc)
            self._item.update(piece)
            self._bytes += len(piece)
        return len(whole)

    def end_item(self) -> int:
        """Return the folded sum of the bytes written since the last call."""
        ended, self._item = self._item, FoldedSum()
        return ended.value

    def tell(self) -> int:
        return self._bytes

    def flush(self) -> None:
        self._file.flush()

    def finish(self) -> None:
        """Flush the file to disk."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._waiting = 0

    @property
    def sum(self) -> FileSum:
        return FileSum(self._bytes, self._crc)


def sum_of(path: Path, go_on: Callable[[], None] = lambda: None) -> FileSum:
    """Return the size and CRC-32 of a file, which is read in pieces; `go_on` is called after each."""
    size = crc = 0
    buffer = memoryview(bytearray(_PIECE))
    with open_regular(path, buffering=0) as file:
        while count := file.readinto(buffer):  # type: ignore[attr-defined]  # without buffering, a FileIO
            crc = zlib.crc32(buffer[:count], crc)
            size += count
            go_on()
    return FileSum(size, crc)


def write_manifest(folder: Path, known: Mapping[str, FileSum], *, attempt: str | None = None) -> None:
    """Write the manifest of all files of a folder; files without a `known` sum are read.

    `attempt` distinguishes this save from other saves of the same iteration.
    """
    sums = {name: known.get(name) or sum_of(folder / name) for name in sorted(_files_in(folder)) if name != MANIFEST}
    lines = [f"{json.dumps(name)}: {json.dumps(asdict(total))}" for name, total in sums.items()]
    head = f'{{"format": 1, "attempt": {json.dumps(attempt)}, "files": {{\n'
    replace_file(folder / MANIFEST, head + ",\n".join(lines) + "\n}}\n")


def _files_in(folder: Path) -> Iterator[str]:
    """Yield the names of all files in a folder and its subfolders, without a `stat` of each."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield from (f"{entry.name}/{name}" for name in _files_in(Path(entry.path)))
            elif entry.is_file():
                yield entry.name


def attempt_of(folder: Path) -> str | None:
    """Return the name of the save that wrote a checkpoint; None if it is unknown or the folder has no manifest."""
    try:
        return attempt_in(read_bytes(folder / MANIFEST, at_most=LARGEST))
    except OSError:
        return None


def attempt_in(manifest: bytes) -> str | None:
    """Return the name of the save in the content of a manifest; None if the manifest has none."""
    try:
        found = json.loads(manifest)["attempt"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return found if isinstance(found, str) else None


def _whole(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError(f"{value!r:.80} is no number of bytes and no checksum")
    return value


def read_manifest(folder: Path) -> dict[str, FileSum]:
    """Return size and checksum of each file of a checkpoint. Raises ValueError if the manifest is damaged."""
    return sums_in(read_bytes(folder / MANIFEST, at_most=LARGEST))


def sums_in(manifest: bytes) -> dict[str, FileSum]:
    """Return size and checksum of each file in the content of a manifest. Raises ValueError if it is damaged."""
    try:
        files = json.loads(manifest)["files"]
        sums = {name: FileSum(_whole(entry["bytes"]), _whole(entry["crc32"])) for name, entry in files.items()}
        for name in sums:
            for part in name.split("/"):
                plain(part)
    except Escapes as error:
        raise ValueError(f"its {MANIFEST} names files outside of it, or none: {error}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"its {MANIFEST} is damaged ({type(error).__name__}: {error!s:.200})") from error
    return sums


def is_complete(folder: Path) -> bool:
    """Return whether a folder is a checkpoint: it has a manifest."""
    return (folder / MANIFEST).is_file()


def misfit(sums: Mapping[str, FileSum], sizes: Mapping[str, int]) -> str | None:
    """Compare a checkpoint's file names and sizes with its manifest's; return the first problem or None."""
    loaded = (name for name in sizes if "/" not in name and (name.endswith(TENSORS) or name in _LOADED))
    if unlisted := sorted(name for name in (SUMMARY, *loaded) if name not in sums):
        return f"its {MANIFEST} does not list {unlisted[0]}"
    for name, expected in sums.items():
        if name not in sizes:
            return f"{name} is missing"
        if sizes[name] != expected.bytes:
            return f"{name} has {sizes[name]:,} bytes, not {expected.bytes:,}"
    return None


def first_look(folder: Path) -> str | None:
    """Check a checkpoint's file sizes, and the checksums of all files but tensors; return the first problem or None."""
    if not is_complete(folder):
        return f"it has no {MANIFEST}: it was not saved to its end, or is damaged"
    try:
        sums, sizes = read_manifest(folder), {name: (folder / name).stat().st_size for name in _files_in(folder)}
    except (OSError, ValueError) as error:
        return _unreadable(error)
    return misfit(sums, sizes) or damage(folder, [name for name in sums if not name.endswith(TENSORS)])


def damage(folder: Path, names: Iterable[str] | None = None, go_on: Callable[[], None] = lambda: None) -> str | None:
    """Read files (default: all), compare their checksums, and return the first problem; None if all are as written.

    `go_on` is called after each piece of a file.
    """
    try:
        sums = read_manifest(folder)
        for name in sums if names is None else names:
            found, expected = sum_of(folder / name, go_on), sums[name]
            if found.bytes != expected.bytes:
                return f"{name} has {found.bytes:,} bytes, not {expected.bytes:,}"
            if found != expected:
                return f"{name} is damaged: its checksum is {found.crc32:08x}, not {expected.crc32:08x}"
    except (OSError, ValueError) as error:
        return _unreadable(error)
    return None


def _unreadable(error: OSError | ValueError) -> str:
    if isinstance(error, FileNotFoundError):
        return f"{Path(str(error.filename)).name} is missing"
    if isinstance(error, OSError):
        return f"{Path(str(error.filename)).name} cannot be read: {in_words(error)}"
    return str(error)


def in_words(error: OSError) -> str:
    """Return the file system's message for an error."""
    return error.strerror or str(error)


class Damaged(UserError):
    """Raised if the bytes of a file differ from the bytes that were written. The message names the file."""
