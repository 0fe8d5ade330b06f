"""Where the elements of a JSON array lie, without keeping them."""

from __future__ import annotations

import json
from io import BufferedReader
from pathlib import Path

import numpy as np

from megavlm.data.records.spans import BOM, Spans

_CHUNK = 2**24
_LONGEST = 2**28  # characters of one element
_SPACE = " \t\r\n"


class NotAnArray(ValueError):
    """The file is no JSON array; the message says where it stops being one."""


def array_spans(path: Path) -> Spans:
    """The elements of the array that is all of `path`. About 100 MB/s; raises NotAnArray."""
    bounds: list[tuple[int, int]] = []
    with path.open("rb") as file:
        window = _Window(file)
        try:
            window.expect("[")
            while window.peek() != "]":
                if bounds:
                    window.expect(",")
                bounds.append(window.element())
            window.expect("]")
            window.expect("")
        except (ValueError, RecursionError) as error:
            raise NotAnArray(f"at byte {window.position}, element {len(bounds)}: {error}") from error
    starts, ends = np.array(bounds, np.int64).reshape(-1, 2).T
    return Spans(np.ascontiguousarray(starts), np.ascontiguousarray(ends))


class _Window:
    """A file piece by piece, as text of one character per byte.

    Latin-1 makes it so: what delimits JSON is ASCII, in UTF-8 as well, and the rest need not be understood here.
    """

    def __init__(self, file: BufferedReader) -> None:
        self._file = file
        self._scan = json.JSONDecoder().raw_decode
        self._base = len(BOM) if file.read(len(BOM)) == BOM else 0  # byte number of the text's first character
        file.seek(self._base)
        self._text, self._at = "", 0

    @property
    def position(self) -> int:
        return self._base + self._at

    def peek(self) -> str:
        """The next character that is no space; "" at the end."""
        while True:
            while self._at < len(self._text) and self._text[self._at] in _SPACE:
                self._at += 1
            if self._at < len(self._text) or not self._grow():
                return self._text[self._at : self._at + 1]

    def expect(self, wanted: str) -> None:
        found = self.peek()
        if found != wanted:
            raise ValueError(f"{_named(wanted)} is missing, {_named(found)} stands there")
        self._at += 1

    def element(self) -> tuple[int, int]:
        """Bytes [start, end) of the next value."""
        self.peek()
        while True:
            try:
                _, end = self._scan(self._text, self._at)
            except json.JSONDecodeError as error:
                if len(self._text) - self._at < _LONGEST and self._grow():
                    continue
                raise ValueError(error.msg) from None  # its line and column are those of a window
            if end == len(self._text) and self._grow():  # a number may go on
                continue
            start, self._at = self._at, end
            return self._base + start, self._base + end

    def _grow(self) -> bool:
        """Read on, as much again as is left, and let go of what is behind. False at the end of the file."""
        left = self._text[self._at :]
        more = self._file.read(max(_CHUNK, len(left)))
        if more:
            self._base, self._at, self._text = self._base + self._at, 0, left + more.decode("latin-1")
        return bool(more)


def _named(character: str) -> str:
    return repr(character) if character else "the end"
