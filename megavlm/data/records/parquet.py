"""Read the rows of a parquet file by number."""

from __future__ import annotations

import os
from collections import OrderedDict
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from megavlm.data.records.turns import COLUMNS
from megavlm.data.types import BadSample, Reason
from megavlm.errors import UserError

_BUDGET = 2**31  # most bytes of a decoded row group: some kilobytes of a file may decode to many gigabytes
_BATCH = 1024  # rows that are decoded before their bytes are counted
_CACHE = 2**28  # bytes of decoded row groups that are kept per file; the newest is kept whatever its size


def pyarrow_parquet() -> Any:
    """Return the module `pyarrow.parquet`. Raises UserError if it is not installed."""
    try:
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise UserError("--datasets has parquet files, which need pyarrow: pip install pyarrow") from error
    return parquet


class ParquetFile:
    """Implements `Container` on a parquet file: a record is a row, as a dict of the columns that conversations use.

    A row group is decoded as a whole and cached. The constructor raises ValueError for a file that is not parquet.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        metadata = pyarrow_parquet().read_metadata(path)  # raises ArrowInvalid, which is a ValueError
        groups = [metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)]
        self._ends = np.cumsum(groups, dtype=np.int64)
        names = metadata.schema.to_arrow_schema().names
        known = tuple(name for name in names if name in COLUMNS)
        self._columns = known or tuple(names)  # if none is known, a message lists all
        self._reader: _Reader | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_reader": None}

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def read(self, index: int) -> Any:
        reader = self._reader
        if reader is None or reader.process != os.getpid():  # after a fork, Arrow's threads are the parent's
            reader = self._reader = _Reader(self._path, self._columns)
        group = int(np.searchsorted(self._ends, index, side="right"))
        first = int(self._ends[group - 1]) if group else 0
        try:
            return reader.group(group).slice(index - first, 1).to_pylist()[0]
        except (OSError, ValueError, NotImplementedError) as error:  # Arrow's own errors derive from these
            raise BadSample(Reason.NOT_A_RECORD, f"row group {group} cannot be read: {error}") from error

    def label(self, index: int) -> str:
        return f"{self._path.name}[{index}]"


class _Reader:
    """Holds an open file and a cache of the row groups that were read last."""

    def __init__(self, path: Path, columns: tuple[str, ...]) -> None:
        self.process = os.getpid()
        self._file = pyarrow_parquet().ParquetFile(path, memory_map=True)
        self._columns = list(columns)
        self._groups: OrderedDict[int, Any] = OrderedDict()
        self._sizes: dict[int, int] = {}  # in bytes; kept because Arrow is slow to add them up
        self._lock = Lock()

    def group(self, number: int) -> Any:
        with self._lock:
            if number not in self._groups:
                self._groups[number], self._sizes[number] = self._decoded(number)
            self._groups.move_to_end(number)
            while len(self._groups) > 1 and sum(self._sizes.values()) > _CACHE:
                del self._sizes[self._groups.popitem(last=False)[0]]
            return self._groups[number]

    def _decoded(self, number: int) -> tuple[Any, int]:
        """Return a decoded row group and its size in bytes. Raises ValueError if that exceeds `_BUDGET`."""
        from pyarrow import Table

        described = self._file.metadata.row_group(number)
        declared = sum(described.column(at).total_uncompressed_size for at in range(described.num_columns))
        if declared > _BUDGET:
            raise ValueError(f"it has {declared} bytes, more than {_BUDGET}: write smaller row groups")
        batches, size = [], 0
        for batch in self._file.iter_batches(_BATCH, [number], columns=self._columns, use_threads=False):
            batches.append(batch)
            size += batch.nbytes
            if size > _BUDGET:
                raise ValueError(f"it has more than {_BUDGET} bytes once it is decoded: write smaller row groups")
        return Table.from_batches(batches), size
