"""Write the manifest of a folder that torch's writer has written, with the sums of its items as a save has them."""

from __future__ import annotations

import warnings
import zlib
from itertools import pairwise
from pathlib import Path

import torch.distributed.checkpoint as dcp
from torch import Tensor

from megavlm.checkpoint.items import read_items, write_items
from megavlm.checkpoint.manifest import FileSum, FoldedSum, write_manifest


def write_sums(folder: Path) -> None:
    """Write the manifest; items are where `items.json` says that they are, whatever the files hold there."""
    places: dict[str, list[tuple[int, int]]] = {}
    for each in read_items(folder).storage_data.values():
        places.setdefault(each.file.name, []).append((each.start, each.length))
    write_manifest(folder, {name: _summed((folder / name).read_bytes(), items) for name, items in places.items()})


def _summed(data: bytes, places: list[tuple[int, int]]) -> FileSum:
    bounds = sorted({0, *(bound for start, length in places for bound in (start, start + length))})
    items = tuple((end, _folded(data[start:end])) for start, end in pairwise(bounds))
    return FileSum(len(data), zlib.crc32(data), items)


def _folded(data: bytes) -> int:
    total = FoldedSum()
    total.update(memoryview(data))
    return total.value


def save_tensors(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Save tensors by torch's own writer, and describe them as a save does."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that this is one process
        dcp.save(tensors, checkpoint_id=folder, no_dist=True)
    metadata = dcp.FileSystemReader(folder).read_metadata()
    write_items(folder, metadata, metadata.storage_data)
