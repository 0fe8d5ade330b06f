"""Read the rows of parquet and Arrow files by number, and folders that `save_to_disk` of Hugging Face `datasets` wrote.

A parquet file is decoded one row group at a time, and a process caches the groups that it used last, of whatever files.
An Arrow file is mapped into memory, so that only requested rows are read.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from megavlm.data.records.containers import Choose
from megavlm.errors import UserError
from megavlm.inputs.bad_sample import BadSample, Reason
from megavlm.json_files import OBJECT, check, listed, read_json
from megavlm.paths import Escapes, inside

_CACHE = 2**30  # bytes of decoded row groups that a process caches; the newest is kept whatever its size
STATE, ABOUT, SPLITS = "state.json", "dataset_info.json", "dataset_dict.json"
_FILES, _REORDERED = "_data_files", "_indices_data_files"
_STATE = dict.fromkeys((_FILES, _REORDERED), listed(OBJECT, 0, 2**20))
# Exceptions that Arrow raises for a damaged file; Arrow's own error classes derive from these.
_DAMAGED = (OSError, ValueError, LookupError, TypeError, NotImplementedError)


class TableFile:
    """Implements `Container` on a parquet or Arrow file: a record is a row, as a dict of the columns that `choose`
    selects.

    The constructor raises ValueError or OSError for a file of another format.
    """

    def __init__(self, path: Path, choose: Choose) -> None:
        try:
            import pyarrow  # noqa: F401
        except ImportError as error:
            raise UserError(
                f"--datasets has {path.suffix[1:]} files, which need pyarrow: pip install pyarrow"
            ) from error
        self._path = path
        opened = _open(path)
        self.names = opened.names
        self._ends = np.cumsum(opened.rows, dtype=np.int64)
        self._columns = choose(self.names)
        self._opened: _Parquet | _Arrow | None = None
        self._process = 0

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": None}

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def read(self, index: int) -> Any:
        if self._opened is None or self._process != os.getpid():  # after a fork, its lock is the parent's
            self._opened, self._process = _open(self._path), os.getpid()
        group = int(np.searchsorted(self._ends, index, side="right"))
        first = int(self._ends[group - 1]) if group else 0
        try:
            return self._opened.group(group, self._columns).slice(index - first, 1).to_pylist()[0]
        except _DAMAGED as error:
            what = str(error).strip().partition("\n")[0][:300]
            raise BadSample(Reason.NOT_A_RECORD, f"row group {group} cannot be read: {what}") from error

    def label(self, index: int) -> str:
        return f"{self._path.name}[{index}]"


class _Groups:
    """The decoded row groups that a process used last. Threads share it; a forked process begins with none."""

    def __init__(self) -> None:
        self._forget()
        os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        self._lock = Lock()
        # By file and number, each with its bytes: Arrow is slow to count.
        self._tables: OrderedDict[tuple[_Parquet, int], tuple[Any, int]] = OrderedDict()

    def get(self, file: _Parquet, number: int, columns: list[str]) -> Any:
        key = file, number
        with self._lock:
            if key not in self._tables:
                # Workers share the cores.
                table = file.opened.read_row_group(number, columns=columns, use_threads=False)
                self._tables[key] = table, table.nbytes
            self._tables.move_to_end(key)
            while len(self._tables) > 1 and sum(size for _, size in self._tables.values()) > _CACHE:
                self._tables.popitem(last=False)
            return self._tables[key][0]


_GROUPS = _Groups()


class _Parquet:
    """An open parquet file. Threads may share it."""

    def __init__(self, path: Path) -> None:
        import pyarrow.parquet as pq

        self.opened = pq.ParquetFile(path)
        metadata = self.opened.metadata
        self.rows = [metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)]
        self.names: list[str] = self.opened.schema_arrow.names

    def group(self, number: int, columns: list[str]) -> Any:
        """Return a decoded row group as a table of Arrow."""
        return _GROUPS.get(self, number, columns)


class _Arrow:
    """A memory-mapped file in Arrow's stream or file format."""

    def __init__(self, path: Path) -> None:
        import pyarrow as pa

        with pa.memory_map(str(path)) as file:
            try:
                table = pa.ipc.open_file(file).read_all()
            except pa.ArrowInvalid:
                file.seek(0)
                table = pa.ipc.open_stream(file).read_all()
        self._batches = table.to_batches()
        self.rows = [batch.num_rows for batch in self._batches]
        self.names: list[str] = table.column_names
        self._checked: set[int] = set()

    def group(self, number: int, columns: list[str]) -> Any:
        """Return some columns of a batch of rows, validated first: damaged data may crash the process."""
        batch = self._batches[number].select(columns)
        if number not in self._checked:
            batch.validate(full=True)
            self._checked.add(number)
        return batch


def _open(path: Path) -> _Parquet | _Arrow:
    return _Parquet(path) if path.suffix.lower() == ".parquet" else _Arrow(path)


def is_saved(folder: Path) -> bool:
    """Return whether a folder was written by `save_to_disk` of `datasets`."""
    return (folder / SPLITS).is_file() or all((folder / name).is_file() for name in (STATE, ABOUT))


def saved_files(folder: Path) -> list[Path]:
    """Return the Arrow files of a folder that `save_to_disk` wrote, in order. Raises UserError if it cannot be read."""
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
