"""Read the records of a text file by number: the lines, the elements of a JSON array, or the rows of a CSV table.

The byte ranges of records are found in one pass and kept as two arrays (16 bytes per record); the records stay on disk.
"""

from __future__ import annotations

import csv
import io
import json
import os
import re
from collections import Counter
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from megavlm.config.messages import shown
from megavlm.inputs.bad_sample import BadSample, Reason
from megavlm.paths import open_regular

BOM = b"\xef\xbb\xbf"
DELIMITERS = {".csv": ",", ".tsv": "\t"}
_CHUNK = 2**24  # bytes that are searched for line ends at once
_NEWLINE, _RETURN, _QUOTE = 10, 13, ord('"')
_SPACE = re.compile("[ \t\r\n]*")
csv.field_size_limit(2**26)  # a cell may hold an image as base64


class NotAnArray(ValueError):
    """Raised for a file that is not a JSON array; the message names the byte of the first error."""


@dataclass(frozen=True, eq=False)
class RecordSpans:
    """Byte ranges [start, end) of N records and their line numbers, counted from 1; each an int64 array [N].

    `lines` is None if record i is on line i + 1, or if records are not lines.
    """

    starts: NDArray[np.int64]
    ends: NDArray[np.int64]
    lines: NDArray[np.int64] | None = None


def line_spans(path: Path, *, quoted: bool = False) -> RecordSpans:
    """Return the byte ranges of a file's non-empty lines, without line ends; about 1 GB/s for a cached file.

    If `quoted`, a line break inside a quoted table cell (after an odd number of quotation marks) does not end a line.
    """
    found: list[tuple[NDArray[np.int64], ...]] = [(np.empty(0, np.int64),) * 3]
    marks = at = begin = number = last = 0
    with open_regular(path) as file:  # not mapped: if the file were truncated meanwhile, reading would kill the process
        while piece := file.read(_CHUNK):
            chunk = np.frombuffer(piece, np.uint8)
            begin = len(BOM) if at == 0 and piece.startswith(BOM) else begin
            lines = np.flatnonzero(chunk == _NEWLINE)
            if quoted:
                quotes = np.flatnonzero(chunk == _QUOTE)
                lines = lines[(marks + np.searchsorted(quotes, lines)) % 2 == 0]
                marks += len(quotes)
            starts = np.append(begin, lines + at + 1)
            ends = lines + at - (np.where(lines > 0, chunk[lines - 1], last) == _RETURN)
            kept = np.flatnonzero(ends > starts[:-1])
            found.append((starts[kept], ends[kept], kept + number + 1))
            begin, number = int(starts[-1]), number + len(lines)
            at, last = at + len(piece), piece[-1]
    if (end := at - (last == _RETURN)) > begin:
        found.append((np.array([begin]), np.array([end]), np.array([number + 1])))
    starts, ends, numbers = (np.concatenate(each) for each in zip(*found, strict=True))
    if not len(numbers) or numbers[-1] == len(numbers):  # no empty line lies between them
        return RecordSpans(starts, ends)
    return RecordSpans(starts, ends, numbers)


def array_spans(path: Path) -> RecordSpans:
    """Return the byte range of each element of the JSON array that fills the file `path`, at about 100 MB/s.

    The whole file is held in memory meanwhile. Raises NotAnArray for a file with other content.
    """
    # Latin-1 has one character for each byte, and JSON's delimiters are ASCII, also in UTF-8.
    with open_regular(path) as file:
        text = file.read().decode("latin-1")
    at = len(BOM) if text.startswith(BOM.decode("latin-1")) else 0
    bounds: list[tuple[int, int]] = []
    scan = json.JSONDecoder().raw_decode

    def after(place: int) -> int:
        """Return the offset of the next character from `place` on that is not white space."""
        end = _SPACE.match(text, place)
        assert end is not None
        return end.end()

    def expect(wanted: str) -> int:
        """Return the offset after the character `wanted` and white space. Raises ValueError for another character."""
        if (found := text[at : at + 1]) != wanted:
            named = repr(found) if found else "the end"
            raise ValueError(f"{repr(wanted) if wanted else 'the end'} is missing, {named} stands there")
        return after(at + 1)

    try:
        at = after(at)
        at = expect("[")
        while text[at : at + 1] != "]":
            if bounds:
                at = expect(",")
            _, end = scan(text, at)
            bounds.append((at, end))
            at = after(end)
        at = expect("]")
        expect("")
    except (ValueError, RecursionError) as error:  # of JSON without its line and column, which `at` replaces
        raise NotAnArray(f"at byte {at}, element {len(bounds)}: {getattr(error, 'msg', error)}") from error
    starts, ends = np.array(bounds, np.int64).reshape(-1, 2).T
    return RecordSpans(np.ascontiguousarray(starts), np.ascontiguousarray(ends))


class SpanFile:
    """Implements `Container` on the byte ranges `spans` of a file; `content` says whether they are JSON or text."""

    names = None

    def __init__(self, path: Path, spans: RecordSpans, *, content: Literal["array", "lines", "text"]) -> None:
        self._path = path
        self._spans = spans
        self._content = content
        self._file: FileIO | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_file": None}

    def __len__(self) -> int:
        return len(self._spans.starts)

    def read(self, index: int) -> Any:
        if self._content == "text":
            return {"text": self.text(index)}
        text = self.text(index)
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as error:
            raise BadSample(Reason.NOT_A_RECORD, f"it is not JSON ({error}): {shown(text)}") from error

    def text(self, index: int) -> str:
        """Return the text of record `index`. Raises BadSample if it is not UTF-8."""
        if self._file is None:
            self._file = FileIO(self._path)
        start, end = int(self._spans.starts[index]), int(self._spans.ends[index])
        data = os.pread(self._file.fileno(), end - start, start)  # leaves the file position alone, which threads share
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            why = f"it is not UTF-8 but perhaps Latin-1 (byte {data[error.start]:#x}): convert it, as iconv -f "
            raise BadSample(Reason.NOT_A_RECORD, f"{why}WINDOWS-1252 -t UTF-8 {self._path.name} does") from error

    def label(self, index: int) -> str:
        if self._content == "array":
            return f"{self._path.name}[{index}]"
        return f"{self._path.name}:{index + 1 if self._spans.lines is None else self._spans.lines[index]}"


class CsvFile:
    """Implements `Container` on a .csv or .tsv file: a record is a row; cells are texts, or None if empty.

    The first row has the column names. The constructor raises ValueError if that row is missing, cannot be read or
    names a column twice.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._delimiter = path, DELIMITERS[path.suffix.lower()]
        self._rows = SpanFile(path, line_spans(path, quoted=True), content="text")
        if not len(self._rows):
            raise ValueError("it has no rows")
        try:
            self.names = self._cells(0)
        except BadSample as error:
            raise ValueError(error.detail) from error
        if double := next((name for name, times in Counter(self.names).items() if times > 1), None):
            raise ValueError(f"it has two columns {shown(double)}")

    def __len__(self) -> int:
        return len(self._rows) - 1

    def read(self, index: int) -> Any:
        cells = self._cells(index + 1)
        if len(cells) != len(self.names):
            what = f"it has {len(cells)} cells, the first row {len(self.names)}: look for a stray quotation mark"
            raise BadSample(Reason.NOT_A_RECORD, what)
        return {name: cell or None for name, cell in zip(self.names, cells, strict=True)}

    def label(self, index: int) -> str:
        return f"{self._path.name}[{index}]"

    def _cells(self, row: int) -> list[str]:
        text = self._rows.text(row)
        try:
            (cells,) = csv.reader(io.StringIO(text, newline=""), delimiter=self._delimiter, strict=True)
        except (csv.Error, ValueError) as error:
            raise BadSample(Reason.NOT_A_RECORD, f"it is no row ({error}): {shown(text)}") from error
        return cells
