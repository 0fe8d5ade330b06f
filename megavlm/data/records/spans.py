"""Read records that are pieces of a text file: its lines, or the elements of a JSON array.

Their byte ranges are found in one pass and kept as two arrays (16 bytes per record); the records stay on disk.
"""

from __future__ import annotations

import json
import os
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
_CHUNK = 2**24  # bytes that are searched for line ends at once
LONGEST = 2**28  # bytes of a record
_NEWLINE, _RETURN, _QUOTE = 10, 13, ord('"')


@dataclass(frozen=True, eq=False)
class RecordSpans:
    """Holds the byte range [start, end) of each of N records, int64 [N], and its line number, counted from 1.

    `lines` is None if record i is on line i + 1, or if records are not lines.
    """

    starts: NDArray[np.int64]
    ends: NDArray[np.int64]
    lines: NDArray[np.int64] | None = None


def line_spans(path: Path, *, quoted: bool = False) -> RecordSpans:
    """Return the byte ranges of the lines that are not empty, without line ends; about 1 GB/s for a cached file.

    If `quoted`, a line does not end where an odd number of quotation marks precede: in a quoted cell of a table.
    """
    found: list[tuple[NDArray[np.int64], ...]] = [(np.empty(0, np.int64),) * 3]
    marks = at = begin = number = last = 0
    with open_regular(path) as file:  # not mapped: who looks at what was cut off meanwhile is ended by a signal
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


class SpanFile:
    """Implements `Container` on the pieces of `path` that `spans` gives; each is JSON, or plain text (`content`)."""

    def __init__(self, path: Path, spans: RecordSpans, *, content: Literal["array", "lines", "text"]) -> None:
        self._path = path
        self._spans = spans
        self._content = content
        self.names = None
        self._file: FileIO | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_file": None}

    def __len__(self) -> int:
        return len(self._spans.starts)

    def read(self, index: int) -> Any:
        if self._file is None:
            self._file = FileIO(self._path)
        start, end = int(self._spans.starts[index]), int(self._spans.ends[index])
        if end - start > LONGEST:
            raise BadSample(Reason.NOT_A_RECORD, f"it has {end - start} bytes, more than {LONGEST}")
        data = os.pread(self._file.fileno(), end - start, start)  # leaves the file position alone, which threads share
        try:
            text = data.decode()
        except UnicodeDecodeError as error:
            why = f"it is not UTF-8 but perhaps Latin-1 (byte {data[error.start]:#x}): convert it, as iconv -f "
            raise BadSample(Reason.NOT_A_RECORD, f"{why}WINDOWS-1252 -t UTF-8 {self._path.name} does") from error
        if self._content == "text":
            return {"text": text}
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as error:
            raise BadSample(Reason.NOT_A_RECORD, f"it is not JSON ({error}): {shown(text)}") from error

    def label(self, index: int) -> str:
        if self._content == "array":
            return f"{self._path.name}[{index}]"
        return f"{self._path.name}:{index + 1 if self._spans.lines is None else self._spans.lines[index]}"
