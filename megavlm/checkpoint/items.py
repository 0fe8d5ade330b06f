"""Write and read a checkpoint's JSON files: `items.json`, the places of tensors, and `state.json`, the common state.

Each block of a tensor has a checksum, so that a rank verifies the block while it reads it.

torch and megatron-core use pickles for both, and one more for each tensor; a pickle can run code when it is read. A
save also writes these pickles, so that other programs can read the checkpoint; megavlm reads none of them.
"""

from __future__ import annotations

import json
import math
import os
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from megavlm.checkpoint.manifest import BLOCK, Damaged, FoldedSum
from megavlm.errors import UserError
from megavlm.files import replace_file
from megavlm.json_files import read_json
from megavlm.paths import FileRange, as_file, inside, open_regular

ITEMS, STATE = "items.json", "state.json"
_LARGEST = 2**30  # bytes of a JSON file: 2,000 ranks with 5,000 pieces each stay below
_MOST_DIMENSIONS = 16
_DTYPES = {str(each)[6:]: each for each in vars(torch).values() if isinstance(each, torch.dtype)}


@dataclass(frozen=True)
class Record:
    """A block of a tensor, saved by `torch.save` as `length` bytes at `start` of a file."""

    file: Path
    start: int
    length: int
    sum: int  # folded, of its bytes
    offsets: tuple[int, ...]  # position in the tensor at which the block begins
    sizes: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """Return the number of bytes of the values."""
        return math.prod(self.sizes) * self.dtype.itemsize

    def read(self, into: memoryview | None = None, opened: BinaryIO | None = None) -> None:
        """Read the record into `into`, or only verify it if `into` is None. Raises Damaged for a wrong checksum.

        Each block of bytes is summed up while it is in the cache. `opened` is the record's file, if it is open.
        """
        total = FoldedSum()
        memory = memoryview(bytearray(min(BLOCK, self.length))) if into is None else into
        with open_regular(self.file, buffering=0) if opened is None else nullcontext(opened) as file:
            for at in range(0, self.length, BLOCK):
                block = left = memory[at if into is not None else 0 :][: min(BLOCK, self.length - at)]
                while left:
                    if not (count := os.preadv(file.fileno(), [left], self.start + at + len(block) - len(left))):
                        raise Damaged(f"{self.file.name} is damaged: it ends too early")
                    left = left[count:]
                total.update(block)
        if total.value != self.sum:
            where = f"bytes {self.start:,} to {self.start + self.length:,}"
            raise Damaged(f"{self.file.name} is damaged: the sum of {where} is not what was written")

    def values_at(self, content: memoryview | None = None) -> int:
        """Return the file's byte offset at which the row-major values begin. Raises UserError for a damaged record.

        `content` is the record, if it has been read.

        `torch.save` writes a zip archive whose entry `data/0` holds the values, neither compressed nor in parts.
        """
        if not self.bytes:
            return self.start
        try:
            file = FileRange(self.file, self.start, self.length).open() if content is None else as_file(content)
            with file as part, zipfile.ZipFile(part) as archive:
                [entry] = [each for each in archive.infolist() if each.filename.endswith("/data/0")]
                part.seek(entry.header_offset)
                header = part.read(30)
            names = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
            begin = entry.header_offset + len(header) + names
            stored = entry.compress_type == zipfile.ZIP_STORED and entry.file_size == self.bytes
            if stored and len(header) == 30 and begin + self.bytes <= self.length:
                return self.start + begin
            reason = "its values are not as described"
        except Exception as error:  # damaged bytes may raise any error
            reason = f"{type(error).__name__}: {error}".partition("\n")[0][:200]
        raise UserError(f"{self.file} is damaged ({reason}): use another checkpoint")


class OpenFiles:
    """Cache of open files: keeps at most `at_most` files open, and closes all of them before it would exceed this."""

    def __init__(self, at_most: int = 64) -> None:
        self._at_most, self._open = at_most, dict[Path, BinaryIO]()

    def of(self, path: Path) -> BinaryIO:
        """Return an open file for `path`, opened now or by an earlier call. Raises OSError."""
        if path not in self._open:
            if len(self._open) == self._at_most:
                self.close()
            self._open[path] = open_regular(path, buffering=0)
        return self._open[path]

    def close(self) -> None:
        while self._open:
            self._open.popitem()[1].close()


def write_items(folder: Path, metadata: Metadata, places: Mapping[MetadataIndex, Sequence[Any]]) -> None:
    """Write `items.json` from torch's description of a checkpoint, which must have no other entries than tensors.

    `places` has (file, first byte, length, folded sum) of each block.
    """
    described = {}
    for name, entry in metadata.state_dict_metadata.items():
        assert isinstance(entry, TensorStorageMetadata), f"{name} is no tensor"
        pieces = []
        for chunk in entry.chunks:
            place = places[MetadataIndex(name, chunk.offsets)]
            pieces.append([list(chunk.offsets), list(chunk.sizes), *place])
        described[name] = {"type": str(entry.properties.dtype)[6:], "size": list(entry.size), "pieces": pieces}
    lines = [f"{json.dumps(name)}: {json.dumps(each)}" for name, each in described.items()]
    replace_file(folder / ITEMS, "{\n" + ",\n".join(lines) + "\n}\n")


def read_items(folder: Path) -> Metadata:
    """Read `items.json` into torch's description of a checkpoint, with a `Record` as the place of each block.

    Raises UserError if the file is incomplete, or contradicts itself or the tensor files.
    """
    found = Metadata({}, storage_data={})
    vars(found)["mcore_data"] = {}  # which megatron-core looks for
    files: dict[str, tuple[Path, int]] = {}
    try:
        for name, described in read_json(folder / ITEMS, at_most=_LARGEST).items():
            size, dtype = _shape(described["size"]), _DTYPES[described["type"]]
            records = list(_records(described["pieces"], size, dtype, folder, files))
            if sum(math.prod(each.sizes) for each in records) != math.prod(size):
                raise ValueError(f"pieces of {name:.80} do not make up {list(size)}")
            chunks = [ChunkStorageMetadata(torch.Size(each.offsets), torch.Size(each.sizes)) for each in records]
            found.state_dict_metadata[name] = TensorStorageMetadata(TensorProperties(dtype), torch.Size(size), chunks)
            for chunk, record in zip(chunks, records, strict=True):
                found.storage_data[MetadataIndex(name, chunk.offsets)] = record
    except (OSError, LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
        if isinstance(error, UserError):
            raise
        reason = f"{type(error).__name__}: {error}".partition("\n")[0][:200]
        raise UserError(f"{folder / ITEMS} is damaged ({reason}): use another checkpoint") from error
    return found


def _records(
    pieces: Any, size: tuple[int, ...], dtype: torch.dtype, folder: Path, files: dict[str, tuple[Path, int]]
) -> Iterator[Record]:
    for offsets, sizes, file, start, length, total in pieces:
        if file not in files:
            files[file] = (inside(folder, file), (folder / file).stat().st_size)
        path, there = files[file]
        first, many, folded = map(_whole, (start, length, total))
        record = Record(path, first, many, folded, _shape(offsets), _shape(sizes), dtype)
        if any(at + many > whole for at, many, whole in zip(record.offsets, record.sizes, size, strict=True)):
            raise ValueError("a piece goes beyond its tensor")
        if record.start + record.length > there or record.bytes > record.length:
            raise ValueError(f"{file} is too short for a piece")
        yield record


def _shape(values: Any) -> tuple[int, ...]:
    if type(values) is not list or len(values) > _MOST_DIMENSIONS:
        raise ValueError("the size of a tensor is no shape")
    return tuple(map(_whole, values))


def _whole(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**62:
        raise ValueError(f"{value!r:.80} is no size")
    return value


def state_as_json(state: Mapping[str, Any]) -> bytes:
    """Serialize plain values and small tensors, such as optimizers' step counters, as the content of `state.json`."""
    return json.dumps(state, default=_tensor_as_json).encode()


def _tensor_as_json(value: Any) -> dict[str, Any]:
    assert isinstance(value, Tensor), f"{type(value).__name__} cannot be part of a checkpoint's common state"
    return {"tensor": value.tolist(), "dtype": str(value.dtype)[6:]}


def read_state(folder: Path) -> dict[str, Any]:
    """Return a checkpoint's common state, from `state.json`: positions and settings. Raises UserError if damaged."""
    try:
        return {name: _with_tensors(value) for name, value in read_json(folder / STATE).items()}
    except (LookupError, TypeError, ValueError, RuntimeError, RecursionError, OverflowError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{folder / STATE} is damaged ({type(error).__name__}): use another checkpoint") from error


def _with_tensors(value: Any) -> Any:
    if isinstance(value, list):
        return [_with_tensors(each) for each in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {"tensor", "dtype"}:
        return torch.tensor(value["tensor"], dtype=_DTYPES[value["dtype"]])
    return {name: _with_tensors(each) for name, each in value.items()}
