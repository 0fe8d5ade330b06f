"""Read rows of a checkpoint's tensors, saved on any layout, without loading whole tensors.

torch's own reader loads a whole record and copies it into an existing tensor. This takes twice the memory of the
largest tensor, and copies each byte twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from megavlm.checkpoint.hf.hf_files import for_each, read_into
from megavlm.checkpoint.items import Record, read_items
from megavlm.checkpoint.manifest import Damaged, first_look
from megavlm.errors import UserError
from megavlm.families.shared.table import Shape
from megavlm.model.vlm import HoldsWeights
from megavlm.model.weights import set_whole

_AVERAGES = "optimizer.state.ema."
_MAIN = "optimizer.state.param."


@dataclass(frozen=True)
class Stored:
    """Shape and type of a tensor in a checkpoint."""

    shape: Shape
    dtype: torch.dtype


class TrainedRecords(Protocol):
    """Interface to read weights at full precision, from a checkpoint or from a model in training."""

    stored: dict[str, Stored]

    def verify(self, keys: Iterable[str]) -> None: ...

    def read(self, key: str, start: int, stop: int) -> Tensor: ...


class CheckpointReader:
    """Reads rows of a checkpoint's tensors. Threads may share a reader."""

    def __init__(self, checkpoint: Path) -> None:
        """Read the checkpoint's list of tensors (`items.json`). Raises UserError if it is damaged."""
        self._checkpoint = checkpoint
        described = read_items(checkpoint)
        self.stored: dict[str, Stored] = {}
        self._records: dict[str, list[Record]] = {}
        for key, entry in described.state_dict_metadata.items():
            assert isinstance(entry, TensorStorageMetadata)
            self.stored[key] = Stored(tuple(entry.size), entry.properties.dtype)
            self._records[key] = [described.storage_data[MetadataIndex(key, each.offsets)] for each in entry.chunks]

    def verify(self, keys: Iterable[str]) -> None:
        """Read tensors and compare them with the checkpoint's checksums. Raises UserError if it is damaged."""
        try:
            if problem := first_look(self._checkpoint):
                raise Damaged(problem)
            for_each(Record.read, [each for key in keys for each in self._records[key]])
        except Damaged as error:
            raise UserError(f"{self._checkpoint} is damaged: {error}. Use another checkpoint") from error

    def read(self, key: str, start: int, stop: int) -> Tensor:
        """Return rows [start, stop) of a tensor, in the stored type and with all of its other dimensions."""
        shape, dtype = self.stored[key].shape, self.stored[key].dtype
        out = torch.empty((stop - start, *shape[1:]), dtype=dtype)
        for record in self._records[key]:
            low, high = max(start, record.offsets[0]), min(stop, record.offsets[0] + record.sizes[0])
            if low >= high:
                continue
            whole_rows = record.sizes[1:] == shape[1:]
            block = out[low - start : high - start]
            if not whole_rows:
                block = torch.empty((high - low, *record.sizes[1:]), dtype=dtype)
            row = record.bytes // max(1, record.sizes[0])
            with record.file.open("rb", buffering=0) as file:
                read_into(file.fileno(), block, _values_at(record) + (low - record.offsets[0]) * row)
            if not whole_rows:
                columns = (slice(at, at + size) for at, size in zip(record.offsets[1:], record.sizes[1:], strict=True))
                out[(slice(low - start, high - start), *columns)] = block
        return out


class TrainedReader(CheckpointReader):
    """Reads weights at full precision: for trained weights, the optimizer's fp32 main weights or, with `averaged`,
    their averages (`--ema-decay`). `CheckpointReader` reads the model's weights, which are rounded main weights.
    """

    def __init__(self, checkpoint: Path, *, averaged: bool = False) -> None:
        """Read the checkpoint's list of tensors. Raises UserError if it is damaged, or lacks averages to read."""
        super().__init__(checkpoint)
        if averaged and not any(key.startswith(_AVERAGES) for key in self.stored):
            raise UserError(f"{checkpoint} has no averaged weights: leave --ema out, or train with --ema-decay 0.999")
        self._kinds = (_AVERAGES, _MAIN) if averaged else (_MAIN,)

    def verify(self, keys: Iterable[str]) -> None:
        super().verify(map(self._held, keys))

    def read(self, key: str, start: int, stop: int) -> Tensor:
        """Return rows [start, stop) of a weight, with all of its other dimensions; in fp32 if it was trained."""
        return super().read(self._held(key), start, stop)

    def _held(self, key: str) -> str:
        return next((held for kind in self._kinds if (held := kind + key) in self.stored), key)


def load_checkpoint(chunks: Sequence[HoldsWeights], checkpoint: Path) -> set[torch.dtype]:
    """Load the weights of a checkpoint of any layout into the chunks of a rank; return the types in which it has them.

    Raises UserError if the checkpoint lacks a weight or is damaged.
    """
    records, found = TrainedReader(checkpoint), set[torch.dtype]()
    keys = {shard.key for chunk in chunks for shard in chunk.shards()}
    if missing := sorted(keys - records.stored.keys()):
        raise UserError(f"{checkpoint} lacks {missing[0]}: it is damaged, or of another version")
    records.verify(keys)

    def read(key: str) -> Tensor:
        values = records.read(key, 0, records.stored[key].shape[0])
        found.add(values.dtype)
        return values

    set_whole(chunks, read)
    return found


_values_at = cache(Record.values_at)  # cached for each record: an export reads a record some rows at a time
