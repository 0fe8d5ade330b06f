"""Open files named by data safely: within its folder, regular, and no larger than expected."""

from __future__ import annotations

import io
import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO


class Escapes(ValueError):
    """A name that leads out of the folder that it belongs to."""


def inside(folder: Path, name: str, *, directory: bool = False) -> Path:
    """Return `folder`/`name` for a plain name of a regular file in it. Raises Escapes; OSError if missing.

    A name with a directory in it is refused, and so is a link that leads out of `folder`, except links of a Hugging
    Face download cache to its own blobs. With `directory`, the name must be a folder in `folder`, not a file.
    """
    path = folder / plain(name)
    if path.is_symlink() and not any(_real(path).is_relative_to(home) for home in _homes(folder)):
        raise Escapes(f"{path} is a link that leads out of its folder")
    if directory and not path.is_dir():
        raise NotADirectoryError(f"{path} is no folder")
    if not directory:
        check_regular(path)
    return path


def _homes(folder: Path) -> Iterator[Path]:
    """Yield the allowed targets of links in `folder`.

    In a Hugging Face cache, models--…/snapshots/REVISION/FILE is a link to models--…/blobs/HASH.
    """
    real = _real(folder)
    yield real
    if real.parent.name == "snapshots":
        yield real.parents[1] / "blobs"


def _real(path: Path) -> Path:
    return Path(os.path.realpath(path))  # Path.resolve() fails for links in a circle


def plain(name: str) -> str:
    """Return `name` if it is a plain file name, without a directory. Raises Escapes for any other."""
    try:
        length = len(os.fsencode(name))
    except UnicodeEncodeError:  # half of a character, as JSON may write it
        length = 0
    if name in (".", "..") or any(each in name for each in "/\\\0") or not 0 < length <= 255:
        raise Escapes(f"{name!r:.80} is no plain file name")
    return name


def check_regular(path: Path) -> None:
    """Raise OSError unless a path is a regular file: opening a FIFO waits for ever, and a device has no end."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(f"{path} is no regular file")


def open_regular(path: Path, *, buffering: int = -1) -> BinaryIO:
    """Open a regular file for reading. Raises OSError for anything else; never waits for a writer."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{path} is no regular file")
    return os.fdopen(descriptor, "rb", buffering=buffering)


def read_bytes(path: Path, *, at_most: int) -> bytes:
    """Return the content of a regular file. Raises OSError for anything else, and for a file of more than `at_most`."""
    with open_regular(path) as file:
        if (size := os.fstat(file.fileno()).st_size) > at_most:
            raise OSError(f"{path} has {size} bytes, more than {at_most}")
        return file.read(size)


@dataclass(frozen=True)
class FileRange:
    """The bytes [start, start + length) of a file. The range is pickled with its record."""

    path: Path
    start: int
    length: int

    def open(self) -> io.BufferedReader:
        """Open the bytes as a readable and seekable file. Raises OSError if the file is not there."""
        file = open_regular(self.path, buffering=0)
        read = lambda buffer, at: os.preadv(file.fileno(), [buffer], self.start + at)  # noqa: E731
        return io.BufferedReader(_Section(self.length, read, file.close))

    def __str__(self) -> str:
        return f"{self.path} from byte {self.start} on"


def as_file(content: memoryview) -> io.BufferedReader:
    """Return bytes as a readable and seekable file, without a copy."""

    def read(buffer: memoryview, at: int) -> int:
        buffer[:] = content[at : at + len(buffer)]
        return len(buffer)

    return io.BufferedReader(_Section(len(content), read, lambda: None))


class _Section(io.RawIOBase):
    def __init__(self, length: int, read: Callable[[memoryview, int], int], close: Callable[[], None]) -> None:
        self._length, self._read, self._close, self._at = length, read, close, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        place = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence]
        if place < 0:
            raise OSError(f"byte {place} lies before the beginning")
        self._at = place
        return place

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        most = max(0, self._length - self._at)
        read = self._read(memoryview(buffer)[:most], self._at)
        self._at += read
        return read

    def close(self) -> None:
        self._close()
        super().close()
