"""`Conversation`: what any data set's record becomes before tokens and pixels are made of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from megavlm.data.bad import BadSample

Role = Literal["system", "user", "assistant", "text"]


@dataclass(frozen=True)
class ImageRef:
    """An image that nobody has opened yet: its encoded bytes, or a file whose path has been checked."""

    source: bytes | Path


@dataclass(frozen=True)
class Turn:
    """What one speaker says: text with images in it, in order. Plain text is one turn of the role `text`."""

    role: Role
    parts: tuple[str | ImageRef, ...]

    @property
    def images(self) -> tuple[ImageRef, ...]:
        return tuple(part for part in self.parts if isinstance(part, ImageRef))


@dataclass(frozen=True)
class Conversation:
    """Turns of one record."""

    turns: tuple[Turn, ...]

    @property
    def images(self) -> tuple[ImageRef, ...]:
        return tuple(image for turn in self.turns for image in turn.images)


class Records(Protocol):
    """A data set whose records can be read in any order, in several processes (it is pickled; files open lazily)."""

    name: str

    def __len__(self) -> int: ...

    def read(self, index: int) -> Conversation:
        """Record `index`. Raises BadSample for one that is no conversation."""
        ...

    def label(self, index: int) -> str:
        """What a message calls record `index`, as in `train.jsonl:18` (counted from 1, as editors do)."""
        ...


class Stream(Protocol):
    """A data set that is read forward only, each rank a part of its own."""

    name: str

    def __iter__(self) -> Iterator[Conversation | BadSample]: ...
