"""Find the byte range of each element of a JSON array without keeping the elements in memory."""

from __future__ import annotations

import json
from io import BufferedReader
from pathlib import Path

import numpy as np

from megavlm.data.records.spans import BOM, LONGEST, RecordSpans

_CHUNK = 2**24
_SPACE = " \t\r\n"


class NotAnArray(ValueError):
    """Raised for a file that is not a JSON array; the message says at which byte it stops being one."""


def array_spans(path: Path) -> RecordSpans:
    """Return the byte range of each element of the JSON array that fills the file `path`, at about 100 MB/s.

    Raises NotAnArray for a file with other content.
    """
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
    return RecordSpans(np.ascontiguousarray(starts), np.ascontiguousarray(ends))


class _Window:
    """Reads a file in chunks, as text of one character per byte.

    Latin-1 decodes every byte to one character. This suffices, because JSON's delimiters are ASCII, also in UTF-8.
    """

    def __init__(self, file: BufferedReader) -> None:
        self._file = file
        self._scan = json.JSONDecoder().raw_decode
        self._base = len(BOM) if file.read(len(BOM)) == BOM else 0  # byte offset in the file where `_text` begins
        file.seek(self._base)
        self._text, self._at = "", 0

    @property
    def position(self) -> int:
        return self._base + self._at

    def peek(self) -> str:
        """Return the next character that is not whitespace, without consuming it; "" at the end of the file."""
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
        """Consume the next value and return its byte range [start, end)."""
        self.peek()
        while True:
            try:
                _, end = self._scan(self._text, self._at)
            except json.JSONDecodeError as error:
                if len(self._text) - self._at < LONGEST and self._grow():
                    continue
                raise ValueError(error.msg) from None  # its line and column would count from the start of the window
            if end == len(self._text) and self._grow():  # a number may continue in the next chunk
                continue
            start, self._at = self._at, end
            return self._base + start, self._base + end

    def _grow(self) -> bool:
        """Append a chunk to the unread text and drop the text before it; return False at the end of the file."""
        left = self._text[self._at :]
        more = self._file.read(max(_CHUNK, len(left)))
        if more:
            self._base, self._at, self._text = self._base + self._at, 0, left + more.decode("latin-1")
        return bool(more)


def _named(character: str) -> str:
    return repr(character) if character else "the end"
