"""Files that data names: they lie in its folder, are regular files, and are no larger than expected."""

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
    """Return `folder`/`name` for a plain name of a regular file in it. Raises Escapes; OSError where it is not there.

    A name with a directory in it is refused, and so is a link that leads out of `folder`; those of a download cache of
    Hugging Face lead to its own blobs. With `directory` it is a folder in `folder`, in place of a file.
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
    """Yield where links in `folder` may lead: models--…/snapshots/REVISION/FILE is a link to models--…/blobs/HASH."""
    real = _real(folder)
    yield real
    if real.parent.name == "snapshots":
        yield real.parents[1] / "blobs"


def _real(path: Path) -> Path:
    return Path(os.path.realpath(path))  # Path.resolve() fails for links in a circle


def plain(name: str) -> str:
    """Return a name that has no directory in it and is none. Raises Escapes for any other."""
    try:
        length = len(os.fsencode(name))
    except UnicodeEncodeError:  # half of a character, as JSON may write it
        length = 0
    if name in (".", "..") or any(each in name for each in "/\\\0") or not 0 < length <= 255:
        raise Escapes(f"{name!r:.80} is no plain file name")
    return name


def check_regular(path: Path) -> None:
    """Raise OSError for what is no regular file: to open a FIFO waits for ever, a device has no end."""
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
    """The bytes [start, start + length) of a file. It is pickled with the record that names it."""

    path: Path
    start: int
    length: int

    def open(self) -> io.BufferedReader:
        """Return the bytes as a file that can be read and searched. Raises OSError if the file is not there."""
        file = open_regular(self.path, buffering=0)
        read = lambda buffer, at: os.preadv(file.fileno(), [buffer], self.start + at)  # noqa: E731
        return io.BufferedReader(_Section(self.length, read, file.close))

    def __str__(self) -> str:
        return f"{self.path} from byte {self.start} on"


def as_file(content: memoryview) -> io.BufferedReader:
    """Return bytes as a file that can be read and searched; they are not copied."""

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
