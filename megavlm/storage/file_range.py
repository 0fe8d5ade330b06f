"""A part of a local file that is read as a file of its own: a clip inside a tar, of which no copy is made."""

from __future__ import annotations

import io
import os
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from megavlm.paths import open_regular


@dataclass(frozen=True)
class FileRange:
    """The bytes [start, start + length) of a file. It is pickled with the record that names it."""

    path: Path
    start: int
    length: int

    def open(self) -> io.BufferedReader:
        """Return the bytes as a file that can be read and searched. Raises OSError if the file is not there."""
        return io.BufferedReader(_Section(open_regular(self.path, buffering=0), self.start, self.length))

    def __str__(self) -> str:
        return f"{self.path} from byte {self.start} on"


class _Section(io.RawIOBase):
    def __init__(self, file: BinaryIO, start: int, length: int) -> None:
        self._file, self._start, self._length, self._at = file, start, length, 0

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
        read = os.preadv(self._file.fileno(), [memoryview(buffer)[:most]], self._start + self._at)
        self._at += read
        return read

    def close(self) -> None:
        self._file.close()
        super().close()
