"""Copy a rank's state into memory shared with its writer process, and write the rank's checkpoint files from there.

The memory is kept for the next save. For a GPU it is pinned, so that copies run at the speed of the bus.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

import torch
from torch.distributed.checkpoint import FileSystemWriter, Metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.storage import WriteResult
from torch.serialization import get_crc32_options, set_crc32_options

from megavlm.backend.host_copies import SharedMemory
from megavlm.checkpoint.items import ITEMS, write_items
from megavlm.checkpoint.manifest import FileSum, SummingFile, in_words
from megavlm.files import open_new

THREADS = 2  # files of a rank, each written by a thread
_ALIGNMENT = 64  # bytes: suits every element type, and is the size of a cache line

Item = tuple[MetadataIndex, torch.Tensor]
Place = tuple[str, int, int, int]  # of an item: its file, first byte, length and folded sum


@dataclass(frozen=True)
class FilePlace:
    """Place of an item in the shared memory (offset and size in bytes), with its type and shape."""

    index: MetadataIndex
    offset: int
    bytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]


Places = Mapping[str, Sequence[FilePlace]]  # by file


class Staging(SharedMemory):
    """The shared memory of a rank. Processes forked after its creation share it, also when it grows later."""

    def copy(self, files: Mapping[str, Sequence[Item]]) -> Places:
        """Copy items into the memory, wait until the copies are done, and return the place of each item."""
        places: dict[str, list[FilePlace]] = {}
        end = 0
        for name, items in files.items():
            places[name] = []
            for index, data in items:
                place = _place(index, data, end)
                places[name].append(place)
                end = math.ceil((place.offset + place.bytes) / _ALIGNMENT) * _ALIGNMENT
        on_gpu = any(tensor.is_cuda for items in files.values() for _, tensor in items)
        self.reserve(end, pins=on_gpu)
        for name, items in files.items():
            for (_, data), place in zip(items, places[name], strict=True):
                if data.numel():
                    _at(self, place).copy_(data.detach(), non_blocking=True)
        if on_gpu:
            torch.cuda.synchronize()
        return places


def items_at(memory: SharedMemory, places: Places) -> dict[str, list[Item]]:
    """Return the items of files as views of the shared memory, without a copy."""
    return {name: [(each.index, _at(memory, each)) for each in of_file] for name, of_file in places.items()}


def _at(memory: SharedMemory, place: FilePlace) -> torch.Tensor:
    return memory.tensor(place.offset, place.shape, place.dtype)


def _place(index: MetadataIndex, data: torch.Tensor, offset: int) -> FilePlace:
    return FilePlace(index, offset, data.numel() * data.itemsize, data.dtype, tuple(data.shape))


@dataclass(frozen=True)
class Written:
    """Result of writing a rank's files: the place of each item, and the checksums of the files."""

    places: Sequence[tuple[str, Sequence[int], Place]]
    sums: Mapping[str, FileSum]


class SaveError(Exception):
    """Raised if a file of a checkpoint cannot be written. The message names file and reason in one line."""


class NotFinite(SaveError):
    """Raised if the state to save has a NaN or an infinity. The message is the name of the tensor."""


def write_share(
    folder: Path,
    files: Mapping[str, Iterable[Item]],
    whole: Mapping[str, bytes],
    *,
    go_on: Callable[[], None] = lambda: None,
) -> Written:
    """Write a rank's files; return the places of their items, and the files' checksums.

    `go_on` is called before each piece of a file; an exception from it ends the write.

    Raises NotFinite for a tensor that has a NaN or an infinity, SaveError if a file cannot be written.
    """
    places: list[tuple[str, Sequence[int], Place]] = []
    sums: dict[str, FileSum] = {}
    lock = threading.Lock()

    def write(name: str) -> None:
        items = files[name] if name in files else whole[name]
        found, total = write_file(folder / name, items, go_on)
        with lock:
            places.extend(found)
            sums[name] = total

    with without_record_sums(), ThreadPoolExecutor(THREADS) as pool:
        for _ in pool.map(write, [*files, *whole]):
            pass  # raises the first error of a file
    return Written(places, sums)


def write_file(
    path: Path, content: Iterable[Item] | bytes, go_on: Callable[[], None] = lambda: None
) -> tuple[list[tuple[str, Sequence[int], Place]], FileSum]:
    """Write and flush one file; return the places of its items, and its checksum. Raises SaveError."""
    places: list[tuple[str, Sequence[int], Place]] = []
    stream = None
    try:
        with open_new(path) as file, without_record_sums():
            stream = SummingFile(file, go_on)
            if isinstance(content, bytes):
                stream.write(content)
            else:
                for index, data in content:
                    if _is_bad(data):
                        raise NotFinite(index.fqn)
                    start = stream.tell()
                    torch.save(alone(data), cast(IO[bytes], stream))  # of a file it uses `write`
                    place = (path.name, start, stream.tell() - start, stream.end_item())
                    places.append((index.fqn, list(index.offset or ()), place))
            stream.finish()
    except OSError as error:
        raise SaveError(f"{path.name} cannot be written: {in_words(error)}") from error
    except RuntimeError as error:
        # torch's archive continues after a failed write, and raises an error of its own.
        cause = stream.error if stream is not None else None
        if cause is not None and not isinstance(cause, OSError):
            raise cause from error
        raise SaveError(f"{path.name} cannot be written: {in_words(cause) if cause else error}") from error
    return places, stream.sum


def write_metadata(folder: Path, metadata: Metadata, written: Sequence[Written]) -> None:
    """Write `items.json`, with the places of all ranks' tensors, and torch's `.metadata`. Raises SaveError."""
    try:
        spots = [(MetadataIndex(name, torch.Size(at)), place) for each in written for name, at, place in each.places]
        results = [
            WriteResult(index, length, _StorageInfo(file, start, length)) for index, (file, start, length, _) in spots
        ]
        FileSystemWriter(folder).finish(metadata, [results])
        write_items(folder, metadata, dict(spots))
    except OSError as error:
        raise SaveError(f"{ITEMS} cannot be written: {in_words(error)}") from error


def _is_bad(data: torch.Tensor) -> bool:
    """Return whether a tensor has a NaN or an infinity; False for types of one byte, which are not checked."""
    if not data.is_floating_point() or data.itemsize == 1 or not data.numel():
        return False
    return not bool(torch.stack(torch.aminmax(data)).isfinite().all())


def alone(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor in host memory, row-major, in its own storage: `torch.save` writes whole storages."""
    tensor = tensor.detach().cpu().contiguous()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


@contextmanager
def without_record_sums() -> Iterator[None]:
    """Make `torch.save` skip the checksum of each record, which takes four times as long as writing and is never read.

    Up to torch 2.12 the setting holds for the process, later for each thread: so the starter of threads enters this
    context, and each thread does.
    """
    before = get_crc32_options()
    set_crc32_options(False)
    try:
        yield
    finally:
        set_crc32_options(before)
