"""Define containers, which return raw records by number: from one file, or from several as one."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any, Protocol

from megavlm.data.records.split import key_of
from megavlm.data.types import Conversation

Choose = Callable[[Sequence[str]], list[str]]
"""Returns those of a table's columns that are read."""


class Records(Protocol):
    """A map-style data set: records are read by number, in any order and in several processes (it is pickled).

    `unread` are fields that look like pictures, where none are read.
    """

    name: str
    unread: Sequence[str]

    def __len__(self) -> int: ...

    def read(self, index: int) -> Conversation:
        """Return record `index`. Raises BadSample if it is no conversation."""
        ...

    def key(self, index: int) -> bytes:
        """Return what the content of record `index` hashes to (`records/split.py`). Raises BadSample if it cannot be
        read.
        """
        ...

    def label(self, index: int) -> str:
        """Return the name of record `index` in messages, as in `train.jsonl:18` (counted from 1, as editors do)."""
        ...


class Container(Protocol):
    """Returns raw records by number. A container can be pickled and used from threads and forked processes.

    `names` are all columns of a table, of which a record may have fewer; None: each record has fields of its own.
    """

    @property
    def names(self) -> Sequence[str] | None: ...

    def __len__(self) -> int: ...

    def read(self, index: int) -> Any:
        """Return record `index`, which consists of JSON types and bytes. Raises BadSample if it cannot be read."""
        ...

    def label(self, index: int) -> str:
        """Return the name of record `index` in messages, as in `train.jsonl:18`."""
        ...


class Joined:
    """Concatenates containers, in order."""

    def __init__(self, parts: Sequence[Container]) -> None:
        self._parts = tuple(parts)
        self._ends = list(accumulate(len(part) for part in parts))
        self.names = self._parts[0].names

    def __len__(self) -> int:
        return self._ends[-1]

    def read(self, index: int) -> Any:
        part, place = self._find(index)
        return part.read(place)

    def label(self, index: int) -> str:
        part, place = self._find(index)
        return part.label(place)

    def _find(self, index: int) -> tuple[Container, int]:
        number = bisect_right(self._ends, index)
        return self._parts[number], index - (self._ends[number - 1] if number else 0)


def renamed(record: Any, columns: Mapping[str, str]) -> Any:
    """Return a record with fields of other names: `columns` are the new names, each with the one that it had."""
    if not isinstance(record, Mapping) or not columns:
        return record
    kept = {name: value for name, value in record.items() if name not in columns.values()}
    return {**kept, **{name: record.get(column) for name, column in columns.items()}}


class Renamed:
    """Gives the fields of records other names."""

    def __init__(self, container: Container, columns: Mapping[str, str]) -> None:
        self._container, self._columns = container, dict(columns)
        self.names = container.names

    def __len__(self) -> int:
        return len(self._container)

    def read(self, index: int) -> Any:
        return renamed(self._container.read(index), self._columns)

    def label(self, index: int) -> str:
        return self._container.label(index)


class FileRecords:
    """Implements `Records` on a container; `convert`, which must be picklable, turns raw records into conversations."""

    def __init__(
        self,
        name: str,
        container: Container,
        convert: Callable[[Any], Conversation],
        *,
        unread: Sequence[str] = (),
    ) -> None:
        self.name = name
        self.unread = unread
        self._container = container
        self._convert = convert

    def __len__(self) -> int:
        return len(self._container)

    def read(self, index: int) -> Conversation:
        return self._convert(self._container.read(index))

    def key(self, index: int) -> bytes:
        return key_of(self._container.read(index))

    def label(self, index: int) -> str:
        return self._container.label(index)
