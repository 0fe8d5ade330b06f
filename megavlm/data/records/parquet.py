"""Read the rows of a parquet file by number."""

from __future__ import annotations

import os
from collections import OrderedDict
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from megavlm.data.records import parquet_decoder
from megavlm.data.records.container import Choose
from megavlm.inputs.bad_sample import BadSample, Reason

_CACHE = 2**28  # bytes of decoded row groups that are kept per file; the newest is kept whatever its size
_LARGEST_ROW = 2**28  # bytes
_MOST_VALUES = 2**20  # of a row, with those in its lists and structs: each becomes an object of Python


class ParquetFile:
    """Implements `Container` on a parquet file: a record is a row, as a dict of the columns that `choose` names.

    A row group is decoded as a whole and cached. The constructor raises ValueError for a file that is not parquet.
    """

    def __init__(self, path: Path, choose: Choose) -> None:
        self._path = path
        rows, self.names = parquet_decoder.describe(path)
        self._ends = np.cumsum(rows, dtype=np.int64)
        self._columns = choose(self.names)
        self._groups: _Groups | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_groups": None}

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def read(self, index: int) -> Any:
        group = int(np.searchsorted(self._ends, index, side="right"))
        first = int(self._ends[group - 1]) if group else 0
        groups = self._groups
        if groups is None or groups.process != os.getpid():  # after a fork, its lock is the parent's
            groups = self._groups = _Groups(self._path, self._columns)
        try:
            return record_of(groups.get(group).slice(index - first, 1))
        except (
            OSError,
            ValueError,
            LookupError,
            NotImplementedError,
            RecursionError,
        ) as error:  # Arrow's, too
            raise BadSample(Reason.NOT_A_RECORD, f"row group {group} cannot be read: {error}") from error

    def label(self, index: int) -> str:
        return f"{self._path.name}[{index}]"


class _Groups:
    """A cache of the row groups that were read last. Threads may share it."""

    def __init__(self, path: Path, columns: list[str]) -> None:
        self.process = os.getpid()
        self._path, self._columns = path, columns
        self._tables: OrderedDict[int, Any] = OrderedDict()
        self._sizes: dict[int, int] = {}  # in bytes; kept because Arrow is slow to add them up
        self._failed: dict[int, str] = {}  # row groups that cannot be decoded, which may take a minute to find out
        self._lock = Lock()

    def get(self, number: int) -> Any:
        """Return a row group as a table of Arrow. Raises ValueError if it cannot be decoded."""
        with self._lock:
            if number in self._failed:
                raise ValueError(self._failed[number])
            if number not in self._tables:
                try:
                    table = parquet_decoder.row_group(self._path, number, self._columns)
                except parquet_decoder.ParquetError as error:
                    self._failed[number] = str(error)
                    raise
                self._tables[number], self._sizes[number] = table, table.nbytes
            self._tables.move_to_end(number)
            while len(self._tables) > 1 and sum(self._sizes.values()) > _CACHE:
                del self._sizes[self._tables.popitem(last=False)[0]]
            return self._tables[number]


def record_of(row: Any) -> Any:
    """Return a table's only row in Python's types. Raises ValueError for one that would take too much memory."""
    if row.nbytes > _LARGEST_ROW:
        raise ValueError(f"the row has {row.nbytes} bytes, more than {_LARGEST_ROW}")
    if (values := sum(_values(chunk) for column in row.columns for chunk in column.chunks)) > _MOST_VALUES:
        raise ValueError(f"the row has {values} values, more than {_MOST_VALUES}")
    return row.to_pylist()[0]


def _values(array: Any) -> int:
    """Return how many values an array has, with those in its lists and structs."""
    import pyarrow.types as types

    kind = array.type
    if types.is_struct(kind):
        return len(array) * kind.num_fields + sum(map(_values, array.flatten()))
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return len(array) + _values(array.flatten())
    if types.is_map(kind):
        return len(array) + 2 * (array.offsets[-1].as_py() - array.offsets[0].as_py())
    return len(array)
