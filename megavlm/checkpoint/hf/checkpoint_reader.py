"""Read some rows of a checkpoint's tensors, whatever layout wrote it, without loading whole tensors.

torch's own reader loads a record whole and copies it into a tensor that was there before: that takes twice the memory
of the largest tensor, and copies each byte twice.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import IO, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.utils import _create_file_view

from megavlm.checkpoint.hf.raw import for_each, read_into
from megavlm.checkpoint.manifest import first_look
from megavlm.checkpoint.records import Part, check_record
from megavlm.checkpoint.safety import read_metadata
from megavlm.checkpoint.verified import Damaged, VerifiedItems
from megavlm.errors import UserError
from megavlm.families.shared.table import Shape

_AVERAGES = "optimizer.state.ema."
_MAIN = ("optimizer.state.param.", "optimizer.state.fp32_param.")  # sharded over replicas, and whole


@dataclass(frozen=True)
class Stored:
    """Shape and type of a tensor in a checkpoint."""

    shape: Shape
    dtype: torch.dtype


@dataclass(frozen=True)
class _Record:
    """A block of a tensor, saved by `torch.save` at `offset` of a file."""

    file: Path
    offset: int
    length: int
    first: Shape  # where in the tensor the block begins
    sizes: Shape
    dtype: torch.dtype


class CheckpointReader:
    """Reads rows of a checkpoint's tensors. Threads may share a reader."""

    def __init__(self, checkpoint: Path) -> None:
        """Read the checkpoint's metadata. Raises UserError if it is damaged, or could run code when it is read."""
        self._checkpoint = checkpoint
        metadata = read_metadata(checkpoint)
        self.stored: dict[str, Stored] = {}
        self._records: dict[str, list[_Record]] = {}
        for key, entry in metadata.state_dict_metadata.items():
            if not isinstance(entry, TensorStorageMetadata):
                continue
            dtype = entry.properties.dtype
            self.stored[key] = Stored(tuple(entry.size), dtype)
            for chunk in entry.chunks:
                place = metadata.storage_data[MetadataIndex(key, chunk.offsets)]
                file = checkpoint / place.relative_path
                record = _Record(file, place.offset, place.length, tuple(chunk.offsets), tuple(chunk.sizes), dtype)
                self._records.setdefault(key, []).append(record)

    def verify(self, keys: Iterable[str]) -> None:
        """Read tensors and compare them with the checkpoint's sums. Raises UserError if they are not what was saved."""
        items, records = VerifiedItems.of(self._checkpoint), [each for key in keys for each in self._records[key]]
        try:
            if problem := first_look(self._checkpoint):
                raise Damaged(problem)
            for_each(partial(_verify, items), records)
        except Damaged as error:
            raise UserError(f"{self._checkpoint} is damaged: {error}. Use another checkpoint") from error

    def read(self, key: str, start: int, stop: int) -> Tensor:
        """Return rows [start, stop) of a tensor, in the stored type and with all of its other dimensions."""
        shape, dtype = self.stored[key].shape, self.stored[key].dtype
        out = torch.empty((stop - start, *shape[1:]), dtype=dtype)
        for record in self._records[key]:
            low, high = max(start, record.first[0]), min(stop, record.first[0] + record.sizes[0])
            if low >= high:
                continue
            whole_rows = record.sizes[1:] == shape[1:]
            block = out[low - start : high - start]
            if not whole_rows:
                block = torch.empty((high - low, *record.sizes[1:]), dtype=dtype)
            _read_rows(record, block, low - record.first[0])
            if not whole_rows:
                columns = (slice(at, at + size) for at, size in zip(record.first[1:], record.sizes[1:], strict=True))
                out[(slice(low - start, high - start), *columns)] = block
        return out


class TrainedReader(CheckpointReader):
    """Reads weights at full precision: of what was trained, the fp32 main weights, from which the optimizer rounds
    those that `CheckpointReader` reads, or with `averaged` their averages (`--ema-decay`).
    """

    def __init__(self, checkpoint: Path, *, averaged: bool = False) -> None:
        """Read the checkpoint's metadata. Raises UserError also if it has no averages that are asked for."""
        super().__init__(checkpoint)
        if averaged and not any(key.startswith(_AVERAGES) for key in self.stored):
            raise UserError(f"{checkpoint} has no averaged weights: leave --ema out, or train with --ema-decay 0.999")
        self._kinds = (_AVERAGES, *_MAIN) if averaged else _MAIN

    def verify(self, keys: Iterable[str]) -> None:
        super().verify(map(self._held, keys))

    def read(self, key: str, start: int, stop: int) -> Tensor:
        """Return rows [start, stop) of a tensor with all of its other dimensions: fp32 if it was trained."""
        return super().read(self._held(key), start, stop)

    def _held(self, key: str) -> str:
        return next((held for kind in self._kinds if (held := kind + key) in self.stored), key)


def _verify(items: VerifiedItems, record: _Record) -> None:
    with record.file.open("rb", buffering=0) as file:
        items.verify(file, record.file.name, record.offset, record.length)


def _read_rows(record: _Record, out: Tensor, first_row: int) -> None:
    with record.file.open("rb", buffering=0) as file:
        offset, stride = _where(record)
        read_into(file.fileno(), out, offset + first_row * stride * out.element_size())


@cache
def _where(record: _Record) -> tuple[int, int]:
    """Return the byte of the file at which a record's values begin, and the number of elements from row to row.

    Raises UserError for a record that is damaged, or another than its description says.
    """
    with record.file.open("rb") as file:
        check_record(cast("IO[bytes]", Part(file, record.offset, record.length)), str(record.file))
        view = cast("IO[bytes]", _create_file_view(file, record.offset, record.length))
        try:
            tensor = torch.load(view, map_location="meta", weights_only=True)  # reads the description only
        except Exception as error:  # torch reads fewer opcodes than `check_record`
            raise UserError(f"{record.file} is damaged: use another checkpoint") from error
    fits = isinstance(tensor, Tensor) and tensor.is_contiguous() and tensor.dtype == record.dtype
    if not fits or tuple(tensor.shape) != record.sizes:
        raise UserError(f"{record.file} is damaged (a tensor is another than .metadata says): use another checkpoint")
    begin = tensor.untyped_storage()._checkpoint_offset + tensor.storage_offset() * tensor.element_size()
    return record.offset + begin, tensor.stride(0) if tensor.ndim else 1
