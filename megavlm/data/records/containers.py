"""Define containers, which return raw records by number, and `Records`, which return them as conversations.

`--validation-split` holds out a record if the hash of its content, as a number from 0 to 1, is below the fraction. So
the choice does not depend on the order of records, on other records, on the seed or on the layout. Equal records are
on the same side of the split, and a larger fraction holds out the same records and more.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, Protocol

from megavlm.data.records.shapes import content_of
from megavlm.data.types import Conversation
from megavlm.paths import FileRange

Choose = Callable[[Sequence[str]], list[str]]
"""Selects the columns to read, given the names of all columns of a table."""

_HASH = 8  # bytes
_NEVER = b"\xff" * _HASH  # key of a record without content, which is never held out: training skips the record


class Records(Protocol):
    """A map-style data set of conversations: read by number, in any order, and picklable for worker processes.

    `unread` are fields that look like pictures, if the records have no images or videos that are read.
    """

    name: str
    unread: Sequence[str]

    def __len__(self) -> int: ...

    def read(self, index: int) -> Conversation:
        """Return record `index` as a conversation. Raises BadSample if the record cannot be read or converted."""
        ...

    def key(self, index: int) -> bytes:
        """Return the hash of the content of record `index`. Raises BadSample if the record cannot be read."""
        ...

    def label(self, index: int) -> str:
        """Return the name of record `index` in messages, as in `train.jsonl:18` (counted from 1, as editors do)."""
        ...


class Container(Protocol):
    """Random access to raw records. A container can be pickled and used from threads and forked processes.

    `names` are the columns of a table (a record may lack some); None if each record has its own fields.
    """

    @property
    def names(self) -> Sequence[str] | None: ...

    def __len__(self) -> int: ...

    def read(self, index: int) -> Any:
        """Return record `index` in JSON types and bytes. Raises BadSample if the record cannot be read."""
        ...

    def label(self, index: int) -> str:
        """Return the name of record `index` in messages, as in `train.jsonl:18`."""
        ...


class Joined:
    """Concatenates containers, in order, and renames the fields of their records as `columns` says (see `renamed`)."""

    def __init__(self, parts: Sequence[Container], columns: Mapping[str, str] | None = None) -> None:
        self._parts, self._columns = tuple(parts), dict(columns or {})
        self._ends = list(accumulate(len(part) for part in parts))
        self.names = self._parts[0].names

    def __len__(self) -> int:
        return self._ends[-1]

    def read(self, index: int) -> Any:
        part, place = self._find(index)
        return renamed(part.read(place), self._columns)

    def label(self, index: int) -> str:
        part, place = self._find(index)
        return part.label(place)

    def _find(self, index: int) -> tuple[Container, int]:
        number = bisect_right(self._ends, index)
        return self._parts[number], index - (self._ends[number - 1] if number else 0)


def renamed(record: Any, columns: Mapping[str, str]) -> Any:
    """Return a record with renamed fields; `columns` maps each new name to the old one."""
    if not isinstance(record, Mapping) or not columns:
        return record
    kept = {name: value for name, value in record.items() if name not in columns.values()}
    return {**kept, **{name: record.get(column) for name, column in columns.items()}}


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


def key_of(record: Any) -> bytes:
    """Return the hash of a record's content: its turns or text, and its images as stored in the record.

    Other fields, such as `id`, do not count.
    """
    if not isinstance(record, Mapping):
        return _NEVER
    try:
        text = json.dumps(content_of(record), sort_keys=True, default=_plain)
    except (RecursionError, TypeError, ValueError):
        return _NEVER
    return hashlib.blake2b(text.encode(), digest_size=_HASH).digest()


def key_of_parts(parts: Mapping[str, bytes | FileRange]) -> bytes:
    """Return the hash of a WebDataset sample, given its files keyed by extension."""
    return key_of({"text": [[name, _plain(parts[name])] for name in sorted(parts)]})


def is_held_out(key: bytes, fraction: float) -> bool:
    """Return whether the record with the hash `key` is in the held-out `fraction` of a data set."""
    return int.from_bytes(key, "big") < fraction * 2 ** (8 * _HASH)


def _plain(value: Any) -> str:
    """Return a text for a value that JSON cannot hold: the hash of the bytes of an image or clip, else its repr."""
    if isinstance(value, FileRange):
        with value.open() as file:
            return hashlib.file_digest(file, partial(hashlib.blake2b, digest_size=16)).hexdigest()
    if isinstance(value, bytes | bytearray | memoryview):
        return hashlib.blake2b(value, digest_size=16).hexdigest()
    return repr(value)
