"""Read the rows of a table in a text file (.csv, .tsv) by number; the first row names the columns."""

from __future__ import annotations

import csv
import io
from collections import Counter
from pathlib import Path
from typing import Any

from megavlm.config.messages import shown
from megavlm.data.records.spans import SpanFile, line_spans
from megavlm.inputs.bad_sample import BadSample, Reason

DELIMITERS = {".csv": ",", ".tsv": "\t"}
_LARGEST = 2**26  # bytes of a row; a stray quotation mark may make one of the rest of the file
csv.field_size_limit(_LARGEST)  # a cell may hold an image as base64


class CsvFile:
    """Implements `Container` on a file of delimited text: a record is a row; cells are texts, empty ones None.

    Where rows begin is found in one pass over the file. The constructor raises ValueError for a file whose first row
    does not name columns.
    """

    def __init__(self, path: Path) -> None:
        spans = line_spans(path, quoted=True)
        if not len(spans.starts):
            raise ValueError("it has no rows")
        self._path, self._spans, self._delimiter = path, spans, DELIMITERS[path.suffix.lower()]
        self._rows = SpanFile(path, spans, content="text")
        try:
            self.names = self._cells(0)
        except BadSample as error:
            raise ValueError(error.detail) from error
        if len(self.names) == 1 and any(mark in self.names[0] for mark in ",;\t|"):
            raise ValueError(f"its columns are not separated by {shown(self._delimiter)}")
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
        if (size := int(self._spans.ends[row] - self._spans.starts[row])) > _LARGEST:
            raise BadSample(Reason.NOT_A_RECORD, f"the row has {size} bytes, more than {_LARGEST}")
        text = self._rows.read(row)["text"]
        try:
            (cells,) = csv.reader(io.StringIO(text, newline=""), delimiter=self._delimiter, strict=True)
        except (csv.Error, ValueError) as error:
            raise BadSample(Reason.NOT_A_RECORD, f"it is no row ({error}): {shown(text)}") from error
        return cells
