"""What holds raw records: a file, or several as one."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, Protocol

from megavlm.data.types import Conversation


class Container(Protocol):
    """Raw records by number. It is pickled, and used from threads and forked processes alike."""

    def __len__(self) -> int: ...

    def read(self, index: int) -> Any:
        """Record `index` as JSON has it, with bytes besides. Raises BadSample for what cannot be read."""
        ...

    def label(self, index: int) -> str:
        """Where record `index` is, for a message."""
        ...


class Joined:
    """Containers one after the other."""

    def __init__(self, parts: Sequence[Container]) -> None:
        self._parts = tuple(parts)
        self._ends = list(accumulate(len(part) for part in parts))

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


class FileRecords:
    """`Records` of a container: each raw record goes through `convert`, which must be picklable."""

    def __init__(self, name: str, container: Container, convert: Callable[[Any], Conversation]) -> None:
        self.name = name
        self._container = container
        self._convert = convert

    def __len__(self) -> int:
        return len(self._container)

    def read(self, index: int) -> Conversation:
        return self._convert(self._container.read(index))

    def label(self, index: int) -> str:
        return self._container.label(index)
