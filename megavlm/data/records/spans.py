"""Records that are pieces of a text file: lines, or the elements of a JSON array.

Where they begin and end is found in one pass and kept as two arrays (16 bytes per record); the records stay on disk.
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
from megavlm.data.types import BadSample, Reason

BOM = b"\xef\xbb\xbf"
_CHUNK = 2**24  # bytes that are searched for line ends at once
_NEWLINE, _RETURN = 10, 13


@dataclass(frozen=True, eq=False)
class Spans:
    """Bytes [start, end) of each record, int64 [N], and the lines they are on (None: line i + 1, or no lines)."""

    starts: NDArray[np.int64]
    ends: NDArray[np.int64]
    lines: NDArray[np.int64] | None = None


def line_spans(path: Path) -> Spans:
    """The lines of a file that are not empty, without their ends. About 1 GB/s where the file is in memory."""
    data = np.memmap(path, np.uint8, mode="r")
    found = [np.flatnonzero(data[at : at + _CHUNK] == _NEWLINE) + at for at in range(0, len(data), _CHUNK)]
    ends = np.concatenate([*found, [len(data)]]).astype(np.int64)
    starts = np.concatenate([[len(BOM) if data[:3].tobytes() == BOM else 0], ends[:-1] + 1]).astype(np.int64)
    with_return = (ends > starts) & (data[np.maximum(ends - 1, 0)] == _RETURN)
    ends = ends - with_return
    kept = np.flatnonzero(ends > starts)
    if not len(kept) or kept[-1] == len(kept) - 1:  # no empty line lies between them
        return Spans(starts[: len(kept)], ends[: len(kept)])
    return Spans(starts[kept], ends[kept], kept + 1)


class SpanFile:
    """A `Container` of the pieces that `spans` marks in `path`, each of them JSON, or a text of its own."""

    def __init__(self, path: Path, spans: Spans, *, content: Literal["array", "lines", "text"]) -> None:
        self._path = path
        self._spans = spans
        self._content = content
        self._file: FileIO | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_file": None}

    def __len__(self) -> int:
        return len(self._spans.starts)

    def read(self, index: int) -> Any:
        if self._file is None:
            self._file = FileIO(self._path)
        start, end = int(self._spans.starts[index]), int(self._spans.ends[index])
        data = os.pread(self._file.fileno(), end - start, start)  # moves no position that others share
        try:
            text = data.decode()
        except UnicodeDecodeError as error:
            raise BadSample(Reason.NOT_A_RECORD, f"not UTF-8: {error}") from error
        if self._content == "text":
            return {"text": text}
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as error:
            raise BadSample(Reason.NOT_A_RECORD, f"not JSON ({error}): {shown(text)}") from error

    def label(self, index: int) -> str:
        if self._content == "array":
            return f"{self._path.name}[{index}]"
        return f"{self._path.name}:{index + 1 if self._spans.lines is None else self._spans.lines[index]}"
