"""Read the rows of Arrow files by number, and the folders that Hugging Face `datasets` saves (`save_to_disk`).

Nothing is decoded but the batch that a row is in, and of that no column that is not used: its bytes are those of the
file, mapped into memory. A batch is checked as a whole before a value of it is looked at.
"""

from __future__ import annotations

import mmap
import os
from collections import OrderedDict
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from megavlm.data.records.arrow_index import ArrowIndex, index_of
from megavlm.data.records.container import Choose
from megavlm.data.records.parquet import record_of
from megavlm.errors import UserError
from megavlm.inputs.bad_sample import BadSample, Reason
from megavlm.json_files import OBJECT, check, listed, read_json
from megavlm.paths import Escapes, inside, open_regular

STATE, ABOUT, SPLITS = "state.json", "dataset_info.json", "dataset_dict.json"
_FILES, _REORDERED = "_data_files", "_indices_data_files"
_STATE = dict.fromkeys((_FILES, _REORDERED), listed(OBJECT, 0, 2**20))
# What Arrow raises for a damaged file, whose own errors are of these kinds, too.
_DAMAGED = (OSError, ValueError, LookupError, TypeError, ArithmeticError, NotImplementedError, RecursionError)
_KEPT = 16  # batches that have been checked


class ArrowFile:
    """Implements `Container` on an Arrow file: a record is a row, as a dict of the columns that `choose` names.

    The constructor raises ValueError for a file that is damaged or cannot be read by number.
    """

    def __init__(self, path: Path, choose: Choose) -> None:
        try:
            import pyarrow as pa
        except ImportError as error:
            raise UserError("--datasets has Arrow files, which need pyarrow: pip install pyarrow") from error
        self._path = path
        self._index = index_of(path)
        self._ends = np.cumsum(self._index.rows, dtype=np.int64)
        self.names = pa.ipc.read_schema(pa.py_buffer(self._index.schema)).names
        self._columns = [self.names.index(name) for name in dict.fromkeys(choose(self.names))]
        self._batches: _Batches | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_batches": None}

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def read(self, index: int) -> Any:
        number = int(np.searchsorted(self._ends, index, side="right"))
        first = int(self._ends[number - 1]) if number else 0
        batches = self._batches
        if batches is None or batches.process != os.getpid():  # after a fork, its lock is the parent's
            batches = self._batches = _Batches(self._path, self._index, self._columns)
        try:
            return record_of(batches.get(number).slice(index - first, 1))
        except _DAMAGED as error:
            what = str(error).strip().partition("\n")[0][:300]
            raise BadSample(Reason.NOT_A_RECORD, f"batch {number} cannot be read: {what}") from error

    def label(self, index: int) -> str:
        return f"{self._path.name}[{index}]"


class _Batches:
    """The batches that were read last. Threads may share it."""

    def __init__(self, path: Path, index: ArrowIndex, columns: list[int]) -> None:
        import pyarrow as pa

        self.process = os.getpid()
        with open_regular(path) as file:
            self._file = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._bytes = memoryview(self._file)
        self._schema = pa.ipc.read_schema(pa.py_buffer(index.schema))
        self._index, self._columns = index, columns
        self._tables: OrderedDict[int, Any] = OrderedDict()
        self._lock = Lock()

    def get(self, number: int) -> Any:
        """Return a batch as a table of Arrow. Raises an error of Arrow's if it is damaged."""
        import pyarrow as pa

        with self._lock:
            if self._file.size() < len(self._bytes):  # to look beyond its end would end the process
                raise ValueError("the file has become shorter")
            if number not in self._tables:
                start, end = int(self._index.starts[number]), int(self._index.ends[number])
                message = pa.ipc.read_message(pa.py_buffer(self._bytes[start:end]))
                batch = pa.ipc.read_record_batch(message, self._schema).select(self._columns)
                batch.validate(full=True)
                self._tables[number] = pa.Table.from_batches([batch])
            self._tables.move_to_end(number)
            while len(self._tables) > _KEPT:
                self._tables.popitem(last=False)
            return self._tables[number]


def is_saved(folder: Path) -> bool:
    """Return whether a folder was written by `save_to_disk` of `datasets`."""
    return (folder / SPLITS).is_file() or all((folder / name).is_file() for name in (STATE, ABOUT))


def saved_files(folder: Path) -> list[Path]:
    """Return the Arrow files of such a folder, in order. Raises UserError if it cannot be read."""
    if (folder / SPLITS).is_file():
        splits = sorted(path.name for path in folder.iterdir() if (path / STATE).is_file())
        raise UserError(f"{folder} has the splits {', '.join(splits) or 'of nothing'}: name one, as {folder}/train")
    state = read_json(folder / STATE, at_most=2**26)
    check(state, _STATE, str(folder / STATE))
    if state.get(_REORDERED):
        raise UserError(f"{folder} holds rows in another order than its files: save it again with a newer `datasets`")
    try:
        return [inside(folder, str(each.get("filename"))) for each in state.get(_FILES) or ()]
    except (Escapes, OSError) as error:
        raise UserError(f"{folder / STATE} names a file that is not there: {error}") from error
