"""Find the record batches of an Arrow file without loading them: as in Arrow's description of its columnar format.

A file is a chain of messages, each of which is a mark, the length of its header, the header (a flatbuffer, which says
how long the body is), and the body. The file format is the same chain between a name and a table of contents.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from megavlm.paths import open_regular

_FILE_FORMAT, _MARK = b"ARROW1\0\0", b"\xff\xff\xff\xff"
_SCHEMA, _DICTIONARY, _BATCH = 1, 2, 3  # kinds of messages
_LONGEST = 2**26  # bytes of a header
_MOST = 2**20  # batches of a file


@dataclass(frozen=True, eq=False)
class ArrowIndex:
    """Where the messages of a file lie; rows and byte ranges are those of N record batches, int64 [N]."""

    schema: bytes  # the message that describes the columns
    rows: NDArray[np.int64]
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]


def index_of(path: Path) -> ArrowIndex:
    """Return the index of a file of Arrow's stream or file format. Raises ValueError for a file that is damaged,
    compressed or encoded by dictionaries.
    """
    schema, rows, places = b"", [], []
    with open_regular(path) as file:
        at = len(_FILE_FORMAT) if file.read(len(_FILE_FORMAT)) == _FILE_FORMAT else 0
        size = file.seek(0, os.SEEK_END)
        while at < size:
            mark, length = struct.unpack("<4si", _read(file, at, 8))
            if mark != _MARK or not 0 <= length <= _LONGEST:
                raise ValueError(f"there is no message of Arrow's at byte {at}")
            if not length:
                break
            header = _read(file, at + 8, length)
            kind, message, body = _message(header)
            end = at + 8 + length + body
            if not 0 <= body <= size or end > size:
                raise ValueError(f"it ends inside of the message at byte {at}")
            if kind == _SCHEMA:
                schema = schema or _read(file, at, 8 + length)
            elif kind == _DICTIONARY:
                raise ValueError("a column is encoded by a dictionary: write plain values")
            elif kind == _BATCH:
                rows.append(_rows(header, message))
                places.append((at, end))
            if len(rows) > _MOST:
                raise ValueError(f"it has more than {_MOST} batches of rows: write larger ones")
            at = end
    if not schema:
        raise ValueError("it does not say which columns it has")
    if sum(rows) > 2**20 + 8 * size:  # a table of nothing but nulls is far smaller, and is no data set
        raise ValueError(f"it says that it has {sum(rows)} rows, too many for its size")
    starts, ends = np.array(places, np.int64).reshape(-1, 2).T
    return ArrowIndex(schema, np.array(rows, np.int64), starts, ends)


def _message(header: bytes) -> tuple[int, int, int]:
    """Return the kind of a message, where in its header its own table is, and the bytes of its body."""
    table = _number(header, 0, "<I")
    kind, own, body = (_field(header, table, number) for number in (1, 2, 3))
    if kind is None or own is None:
        raise ValueError("a message says nothing of what it is")
    return (
        _number(header, kind, "<B"),
        own + _number(header, own, "<I"),
        0 if body is None else _number(header, body, "<q"),
    )


def _rows(header: bytes, batch: int) -> int:
    length, compression = _field(header, batch, 0), _field(header, batch, 3)
    if compression is not None:
        raise ValueError("it is compressed: write it without compression")
    rows = 0 if length is None else _number(header, length, "<q")
    if rows < 0:
        raise ValueError(f"a batch has {rows} rows")
    return rows


def _field(header: bytes, table: int, number: int) -> int | None:
    """Return where a field of a flatbuffer's table lies; None if the table does not have it."""
    known = table - _number(header, table, "<i")
    place = 4 + 2 * number
    if place + 2 > _number(header, known, "<H"):
        return None
    offset = _number(header, known + place, "<H")
    return table + offset if offset else None


def _number(header: bytes, at: int, form: str) -> int:
    if not 0 <= at <= len(header) - struct.calcsize(form):
        raise ValueError("the header of a message is damaged")
    found: int = struct.unpack_from(form, header, at)[0]
    return found


def _read(file: BinaryIO, at: int, length: int) -> bytes:
    file.seek(at)
    data = file.read(length)
    if len(data) < length:
        raise ValueError(f"it ends inside of the message at byte {at}")
    return data
