"""Gather the Hugging Face tensors of a model in training, without files, to update an inference server.

`Weights` has the names, types and shapes of the tensors that an export of a checkpoint taken now would have, and
yields these tensors with the same bytes, whatever the layout. Ranks describe their shards as boxes of global tensors,
as checkpoints do (`parallel/shards.py`). A bucket of tensors is assembled by an all-reduce of bytes: one rank
contributes each box, and the others zeros. A rank needs the memory of one bucket beyond that of training.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor, is_main_replica
from torch import Tensor

from megavlm.arch.layers import part_of
from megavlm.checkpoint.hf.adapters import adapters_of
from megavlm.checkpoint.hf.checkpoint_reader import Stored
from megavlm.checkpoint.hf.exporting import Exported
from megavlm.checkpoint.hf.hf_files import DTYPES
from megavlm.checkpoint.hf.sidecar import family_at, sidecars
from megavlm.checkpoint.state import Trained
from megavlm.config.schema import Config
from megavlm.errors import UserError
from megavlm.families.shared.family import ALL_PARTS
from megavlm.families.shared.table import Stack
from megavlm.optim.master_weights import entries_of, held_layouts
from megavlm.parallel.rendezvous import of_all_ranks
from megavlm.parallel.shards import local_part

_ALIGNED = 16  # bytes: each tensor of a bucket begins at a multiple, so that it can be read in its type


class TensorMeta(NamedTuple):
    """Name, type and full shape of a Hugging Face tensor."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class Rows(NamedTuple):
    """Rows `start` … `stop − 1` of a weight of megavlm."""

    key: str
    start: int
    stop: int


class LiveRecords:
    """Reads rows of the weights that the ranks of a run hold, at full precision. All ranks make the same calls."""

    def __init__(self, trained: Trained) -> None:
        """Exchange over all ranks which weights each rank holds."""
        self._trained = trained
        self.device = next(chunk.device for chunk in trained.chunks)
        self._bucket: dict[Rows, Tensor] = {}
        # Master weights of what is trained; of all weights, shape and type, and how many elements this rank gives.
        masters, held = dict[str, int](), dict[str, tuple[Stored, int]]()
        for box in self._masters():
            masters[box.key] = masters.get(box.key, 0) + _given(box)
        for box, dtype in self._model():
            held[box.key] = (Stored(tuple(box.global_shape), dtype), held.get(box.key, (None, 0))[1] + _given(box))
        every = of_all_ranks((masters, held))
        self.stored = {key: stored for _, found in every for key, (stored, _) in found.items()}
        self._trained_keys = {key for found, _ in every for key in found}
        for key, stored in self.stored.items():
            sources = [
                found.get(key, 0) if key in self._trained_keys else model[key][1] if key in model else 0
                for found, model in every
            ]
            assert sum(sources) == math.prod(stored.shape), f"ranks hold {sources} elements of {key}: {stored.shape}"

    def verify(self, keys: Iterable[str]) -> None:
        """Gather tensors for the next calls of `read`. Tensors in memory need no check for damage."""
        self.gather([Rows(key, 0, self.stored[key].shape[0]) for key in keys])

    def read(self, key: str, start: int, stop: int) -> Tensor:
        """Return rows [start, stop) of a tensor of the last bucket, with all of its other dimensions."""
        return self._bucket[Rows(key, start, stop)]

    def gather(self, wanted: Sequence[Rows], types: Sequence[torch.dtype] | None = None) -> None:
        """Gather these rows, rounded to `types` (default: fp32), as the new bucket. All ranks call it."""
        self._bucket = {}  # before there is memory for another one
        if not wanted:
            return
        types = types or [torch.float32] * len(wanted)
        shapes = [(rows.stop - rows.start, *self.stored[rows.key].shape[1:]) for rows in wanted]
        sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in zip(shapes, types, strict=True)]
        starts = [0]
        for size in sizes:
            starts.append(-(-(starts[-1] + size) // _ALIGNED) * _ALIGNED)
        memory = torch.zeros(starts[-1], dtype=torch.uint8, device=self.device)
        for rows, shape, dtype, start, size in zip(wanted, shapes, types, starts, sizes, strict=False):
            self._bucket[rows] = memory[start : start + size].view(dtype).view(shape)
        by_key: dict[str, list[Rows]] = {}
        for rows in wanted:
            by_key.setdefault(rows.key, []).append(rows)
        for box in self._boxes(by_key):
            for rows in by_key[box.key]:
                _copy(box, rows, self._bucket[rows])
        # One rank gives the bytes of an element and all others zeros, so that sums of words carry nothing.
        dist.all_reduce(memory.view(torch.int32))

    def _boxes(self, keys: Iterable[str]) -> Iterator[ShardedTensor]:
        """Yield the boxes of these tensors that this rank contributes to the sum."""
        for box in self._masters():
            if box.key in keys and is_main_replica(box.replica_id):
                yield box
        for box, _ in self._model():
            if box.key in keys and box.key not in self._trained_keys and is_main_replica(box.replica_id):
                yield box

    def _masters(self) -> Iterator[ShardedTensor]:
        """Yield the parts of master weights that this rank holds, of all optimizers."""
        entries = entries_of(self._trained.wrapped)
        for part in self._trained.optimizer.chained_optimizers:
            for _, weights, layout in held_layouts(part, entries):
                yield from layout.parts(local_part(weights))

    def _model(self) -> Iterator[tuple[ShardedTensor, torch.dtype]]:
        """Yield this rank's shards of all weights of the model, with their dtypes in the model."""
        for chunk in self._trained.chunks:
            for box in chunk.shards():
                yield box, getattr(chunk, "dtype", box.dtype)


def _given(box: ShardedTensor) -> int:
    return math.prod(box.local_shape) if is_main_replica(box.replica_id) else 0


def _copy(box: ShardedTensor, rows: Rows, target: Tensor) -> None:
    """Copy the rows of a box that are among `rows` to their places in `target`, in its type."""
    first, *others = box.global_offset
    low, high = max(rows.start, first), min(rows.stop, first + box.local_shape[0])
    if low < high:
        columns = (slice(at, at + size) for at, size in zip(others, box.local_shape[1:], strict=True))
        target[(slice(low - rows.start, high - rows.start), *columns)] = box.data[low - first : high - first]


@dataclass(frozen=True)
class _Unit:
    """Rows of a weight that whole Hugging Face tensors consist of, and how they are gathered."""

    rows: Rows
    names: tuple[str, ...]
    dtype: torch.dtype
    bytes: int  # of the rows and of the tensors together


class Weights:
    """The Hugging Face tensors of a run: `metadata` describes them, and an iteration yields each with its name.

    All ranks iterate together, after any step, and each gets all tensors, on its device and in the order of `metadata`.
    Adapters are merged; with `adapters`, only the adapters are yielded, under PEFT's names. `parts` (of `vision`,
    `projector`, `language`) excludes the weights of other parts, such as a frozen tower.

        weights = Weights(run.engine.trained(), run.config, run.run_dir)
    """

    def __init__(
        self,
        trained: Trained,
        config: Config,
        run_dir: Path,
        *,
        parts: Sequence[str] = ALL_PARTS,
        adapters: bool = False,
        bucket_bytes: int = 2**30,
    ) -> None:
        """Find out which rank holds which weights; every rank calls this.

        A bucket has at most `bucket_bytes`, or one weight of the model. Raises UserError for a run that an export
        would not write as one folder.
        """
        found = sidecars(run_dir)
        if set(found) != {""}:
            what = "consists of parts that no model has together" if found else "has not begun with --init-from"
            raise UserError(f"{run_dir} {what}, so that its weights have no names that a server knows")
        self._records, self._config, self._run_dir, self._sidecar = LiveRecords(trained), config, run_dir, found[""]
        self._parts, self._alone, self._most = parts, adapters, bucket_bytes

    def metadata(self) -> list[TensorMeta]:
        """Return name, type and shape of each tensor, in the order of an iteration; every rank calls this."""
        if self._alone:
            return [TensorMeta(name, each.dtype, tuple(each.shape)) for name, each in self._peft().items()]
        source = self._exported()
        names = [name for unit in _units(source) for each in unit.names for name in _with_copies(source, each)]
        return [_meta(source, name) for name in (*names, *self._beside(source))]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the name and the values of each tensor."""
        for bucket in self.buckets():
            yield from bucket.items()

    def buckets(self) -> Iterator[dict[str, Tensor]]:
        """Yield the tensors by name, as many at once as a bucket holds; free each bucket before asking for the next."""
        if self._alone:
            yield self._peft()
            return
        source, waiting, size = self._exported(), list[_Unit](), 0
        for unit in _units(source):
            if waiting and size + unit.bytes > self._most:
                yield self._made(source, waiting)
                waiting, size = [], 0
            waiting.append(unit)
            size += unit.bytes
        if waiting:
            yield self._made(source, waiting)
        for name in self._beside(source):
            yield {name: source.kept.read(name, slice(None)).to(self._records.device)}

    def _peft(self) -> dict[str, Tensor]:
        return adapters_of(self._records, family_at(self._sidecar), self._config, self._run_dir)[0]

    def _exported(self) -> Exported:
        """Return the export of the current weights and adapters."""
        merged = self._config.lora if self._config.lora.rank else None
        source = Exported.of(self._records, self._run_dir, self._sidecar, self._config.model, merged=merged)
        return replace(source, table={key: rule for key, rule in source.table.items() if part_of(key) in self._parts})

    def _beside(self, source: Exported) -> list[str]:
        """Return the names of source tensors that are no weight of the model; an export copies them unchanged."""
        if set(self._parts) != set(ALL_PARTS):
            return []
        made = {name for rule in source.table.values() for name in rule.hf_names}
        return [name for name in source.kept.tensors if name not in made]

    def _made(self, source: Exported, units: Sequence[_Unit]) -> dict[str, Tensor]:
        """Gather weights and return them as Hugging Face tensors."""
        gathered = [unit for unit in units if not source.is_kept(unit.rows.key)]
        self._records.gather([unit.rows for unit in gathered], [unit.dtype for unit in gathered])
        found: dict[str, Tensor] = {}
        for unit in units:
            for name in unit.names:
                meta = _meta(source, name)
                found |= dict.fromkeys(
                    _with_copies(source, name),
                    torch.empty(meta.shape, dtype=meta.dtype, device=self._records.device),
                )
            for name, first, values in source.pieces(*unit.rows):
                width = values[0].numel()
                found[name].view(-1)[first * width : (first + len(values)) * width] = values.flatten()
        self._records.gather([])
        return found


def _meta(source: Exported, name: str) -> TensorMeta:
    dtype, shape = source.declared[name]
    return TensorMeta(name, DTYPES[dtype], shape)


def _with_copies(source: Exported, name: str) -> list[str]:
    return [name, *source.copies.get(name, ())]


def _units(source: Exported) -> Iterator[_Unit]:
    """Yield the rows to be gathered in the order of the table: of experts that files hold one by one, one expert."""
    for key, rule in source.table.items():
        shape = source.shape(key)
        runs = [(Rows(key, 0, shape[0]), rule.hf_names)]
        if isinstance(rule, Stack):
            runs = [(Rows(key, at, at + 1), each.hf_names) for at, each in enumerate(rule.rules)]
        for rows, names in runs:
            types = {_meta(source, name).dtype for name in names}
            # Values are rounded before they are sent where nothing is added to them.
            dtype = types.pop() if len(types) == 1 and key not in source.adapters else torch.float32
            made = sum(math.prod(meta.shape) * meta.dtype.itemsize for meta in map(lambda n: _meta(source, n), names))
            gathered = (rows.stop - rows.start) * math.prod(source.records.stored[key].shape[1:]) * dtype.itemsize
            yield _Unit(rows, names, dtype, made + gathered)
