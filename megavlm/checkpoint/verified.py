"""Read items of a checkpoint's files and verify each while it is read, by the sums in the manifest. No torch."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO

from megavlm.checkpoint.folded_sum import BLOCK, FoldedSum
from megavlm.checkpoint.manifest import MANIFEST, FileSum, read_manifest
from megavlm.errors import UserError


class Damaged(UserError):
    """Is raised where the bytes of a file are not those that were written. The message names the file."""


class VerifiedItems:
    """Reads items of files."""

    def __init__(self, sums: Mapping[str, FileSum]) -> None:
        """Take the sums of a checkpoint's files, by name."""
        # file → byte at which an item begins → the byte at which it ends, and its sum
        self._items: dict[str, dict[int, tuple[int, int]]] = {
            name: dict(zip((0, *(end for end, _ in total.items)), total.items, strict=False))
            for name, total in sums.items()
            if total.items
        }

    @classmethod
    def of(cls, folder: Path) -> VerifiedItems:
        """Return the reader for a checkpoint. Raises Damaged for a damaged manifest."""
        try:
            return cls(read_manifest(folder))
        except ValueError as error:
            raise Damaged(str(error)) from error

    def read(self, file: IO[bytes], name: str, start: int, into: memoryview) -> None:
        """Fill `into` with the item that begins at `start` of the file `name`. Raises Damaged."""
        self._read(file, name, start, len(into), (into[at : at + BLOCK] for at in range(0, len(into), BLOCK)))

    def verify(self, file: IO[bytes], name: str, start: int, length: int) -> None:
        """Read an item and keep nothing of it. Raises Damaged."""
        block = memoryview(bytearray(min(BLOCK, length)))
        self._read(file, name, start, length, (block[: length - at] for at in range(0, length, BLOCK)))

    def _read(self, file: IO[bytes], name: str, start: int, length: int, blocks: Iterable[memoryview]) -> None:
        """Fill blocks and sum up each while it is in the cache: the item is read from memory once."""
        end, total = start + length, FoldedSum()
        if (items := self._items.get(name)) is None:
            raise Damaged(f"its {MANIFEST} has no sums of what is in {name}")
        expected_end, expected = items.get(start, (-1, 0))
        if expected_end != end:
            raise Damaged(f"{name} is damaged: no item of it lies at bytes {start:,} to {end:,}")
        at = start
        for block in blocks:
            left = block
            while left:
                count = os.preadv(file.fileno(), [left], at)
                if not count:
                    raise Damaged(f"{name} is damaged: it ends {end - at:,} bytes too early")
                left, at = left[count:], at + count
            total.update(block)
        if total.value != expected:
            raise Damaged(f"{name} is damaged: the sum of bytes {start:,} to {end:,} is not what was written")
