"""Write the manifest of a folder that torch's writer has written, with the sums of its items as a save has them."""

from __future__ import annotations

import zlib
from itertools import pairwise
from pathlib import Path

from megavlm.checkpoint.folded_sum import FoldedSum
from megavlm.checkpoint.manifest import FileSum, write_manifest
from megavlm.checkpoint.safety import read_metadata


def write_sums(folder: Path) -> None:
    """Write the manifest; items are where `.metadata` says that they are, whatever the files hold there."""
    places: dict[str, list[tuple[int, int]]] = {}
    for each in read_metadata(folder).storage_data.values():
        places.setdefault(each.relative_path, []).append((each.offset, each.length))
    write_manifest(folder, {name: _summed((folder / name).read_bytes(), items) for name, items in places.items()})


def _summed(data: bytes, places: list[tuple[int, int]]) -> FileSum:
    bounds = sorted({0, *(bound for start, length in places for bound in (start, start + length))})
    items = tuple((end, _folded(data[start:end])) for start, end in pairwise(bounds))
    return FileSum(len(data), zlib.crc32(data), items)


def _folded(data: bytes) -> int:
    total = FoldedSum()
    total.update(memoryview(data))
    return total.value
