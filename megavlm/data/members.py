"""What is known of each text that is embedded: its record, its role there, and what it is the same as."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

RECORD, ROLE, ID, SOURCE = range(4)  # columns of `TextBatch.members`
QUERY, POSITIVE, NEGATIVE, PADDING = 0, 1, 2, -1  # roles


@dataclass(frozen=True)
class Member:
    """A text of a record of pairs: `length` tokens with `images` images and videos.

    Documents of one `identity` are the same to the loss: none of them is a negative of a query whose positive is one.
    """

    role: int
    identity: int
    length: int
    images: int = 0


def identity_of(*parts: str | bytes) -> int:
    """Return a number for what a text is, from an id or its content: equal parts, equal numbers of 62 bits."""
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        encoded = part.encode() if isinstance(part, str) else part
        digest.update(len(encoded).to_bytes(8, "little") + encoded)
    return int.from_bytes(digest.digest(), "little") >> 2
