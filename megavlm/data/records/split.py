"""Hold out a fraction of the records of data sets, chosen by what a record says.

A record is held out if the hash of its content, as a number from 0 to 1, is below the fraction. So the choice depends
on nothing else: not on the order of records, on other records, on the seed or on the layout. Equal records are on the
same side, and a larger fraction holds out the same records and more.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from functools import partial
from typing import Any

from megavlm.data.records.parts import Part
from megavlm.data.records.shapes import content_of
from megavlm.paths import FileRange

_BYTES = 8
_NEVER = b"\xff" * _BYTES  # of a record that has no content: it will be skipped


def key_of(record: Any) -> bytes:
    """Return the hash of what a record says: its turns or text, and its images as the record has them.

    Other fields, as an `id`, do not count.
    """
    if not isinstance(record, Mapping):
        return _NEVER
    try:
        text = json.dumps(content_of(record), sort_keys=True, default=_plain)
    except (RecursionError, TypeError, ValueError):
        return _NEVER
    return hashlib.blake2b(text.encode(), digest_size=_BYTES).digest()


def key_of_parts(parts: Mapping[str, Part]) -> bytes:
    """Return the hash of a sample of a WebDataset, which is files by extension."""
    return key_of({"text": [[name, _plain(parts[name])] for name in sorted(parts)]})


def is_held_out(key: bytes, fraction: float) -> bool:
    """Return whether a record with this hash belongs to the fraction that is held out."""
    return int.from_bytes(key, "big") < fraction * 2 ** (8 * _BYTES)


def _plain(value: Any) -> str:
    """Return what stands for a value that JSON does not have: the hash of the bytes of an image or a clip."""
    if isinstance(value, FileRange):
        with value.open() as file:
            return hashlib.file_digest(file, partial(hashlib.blake2b, digest_size=16)).hexdigest()
    if isinstance(value, bytes | bytearray | memoryview):
        return hashlib.blake2b(value, digest_size=16).hexdigest()
    return repr(value)
