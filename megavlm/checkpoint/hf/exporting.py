"""Export a megavlm checkpoint as a Hugging Face folder, with the files and tensor names of the model it started from.

Tensors are copied some rows at a time, so that the model need not fit into memory.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megavlm.arch.layers import OUTPUT, part_of
from megavlm.arch.objectives import OBJECTIVES, learned_scalars, objective_of
from megavlm.checkpoint import folders
from megavlm.checkpoint.folders import rename_flushed
from megavlm.checkpoint.hf.adapters import Adapters, folded, is_model_adapter, read_adapters
from megavlm.checkpoint.hf.checkpoint_reader import TrainedReader, TrainedRecords
from megavlm.checkpoint.hf.embedding_files import (
    write_embedding_file,
    write_embedding_files,
    write_file_of_parts,
)
from megavlm.checkpoint.hf.hf_files import DTYPE_NAMES, DTYPES, INDEX, PIECE_BYTES, HfFolder, StreamedFile, for_each
from megavlm.checkpoint.hf.pretrained import SCORE, check_size, copies, refuse, with_head
from megavlm.checkpoint.hf.sidecar import TENSORS, Sidecar, copy_kept, exportable, family_at, sidecars
from megavlm.checkpoint.hf.slices import pieces_of, slice_of
from megavlm.checkpoint.summary import model_of, read_summary
from megavlm.config.schema import LoraConfig, ModelConfig
from megavlm.errors import UserError
from megavlm.families.shared.family import ALL_PARTS, Family
from megavlm.families.shared.table import Shape, Table, Transpose
from megavlm.files import replace_file
from megavlm.json_files import read_json
from megavlm.model.weights import real_shape
from megavlm.objective.losses import scale_of

FILE_BYTES = 5 * 10**9

Declared = dict[str, tuple[str, tuple[int, ...]]]  # Hugging Face name → (type in safetensors' spelling, shape)


@dataclass(frozen=True)
class Exported:
    """The tensors of an exported checkpoint: names, types and values, read some rows at a time.

    Trained weights are the fp32 main weights, or their averages, rounded once to the type that the tensor had in the
    folder that the run started from. Untrained weights are read from the sidecar if the run has rounded them.
    """

    records: TrainedRecords
    sidecar: Sidecar
    model: ModelConfig
    family: Family
    table: Table
    kept: HfFolder  # tensors that training does not reach
    adapters: Mapping[str, Adapters]
    merged: LoraConfig | None

    @classmethod
    def of(
        cls,
        records: TrainedRecords,
        checkpoint: Path,
        sidecar: Sidecar,
        model: ModelConfig,
        *,
        part: str | None = None,
        merged: LoraConfig | None = None,
    ) -> Exported:
        """Return the export of the weights that `records` reads. With `part`, the export has this part's weights alone.

        Raises UserError, which names `checkpoint`, if weights are missing or damaged.
        """
        family = family_at(sidecar)
        if sidecar.variant >= len(family.name_prefixes):
            raise UserError(
                f"{sidecar.path / TENSORS} has no known spelling ({sidecar.variant}): the folder is damaged"
            )
        stored = records.stored
        where = f"{checkpoint} is damaged, or its megavlm.json is another checkpoint's"
        check_size(model, ALL_PARTS, [each.shape for each in stored.values()], where=where)
        table = family.table(model, family.name_prefixes[sidecar.variant])
        if objective_of(model).pools:  # the weight of the output layer is unused, and goes back as it came
            table = with_head(table, model)
        if part is not None:
            table = {key: rule for key, rule in table.items() if part_of(key) == part}
        refuse((f"missing {key}" for key in table.keys() - stored.keys()), f"{checkpoint} cannot be exported")
        adapters = read_adapters(records, model) if merged is not None else {}
        adapters = {key: held for key, held in adapters.items() if key in table}  # a part may be all that is written
        return cls(records, sidecar, model, family, table, HfFolder(sidecar.path), adapters, merged)

    @cached_property
    def declared(self) -> Declared:
        """Return type and shape of each exported tensor by name: the model's weights in the order of the table, their
        copies, and then tensors that are kept from the sidecar.
        """
        made = {
            name: (self.sidecar.types.get(name, DTYPE_NAMES[self.records.stored[key].dtype]), shape)
            for key, rule in self.table.items()
            for name, shape in rule.hf_shapes(self.shape(key)).items()
        }
        kept = {name: (info.dtype, info.shape) for name, info in self.kept.tensors.items() if name not in made}
        return {**made, **{copy: made[name] for name, copies in self.copies.items() for copy in copies}, **kept}

    @cached_property
    def copies(self) -> dict[str, list[str]]:
        """Return, for each tensor that the files repeat, the names of its copies (`pretrained.copies`)."""
        found = dict[str, list[str]]()
        for copy, name in copies(self.family, self.sidecar.variant, self.model, self.sidecar.file_of).items():
            found.setdefault(name, []).append(copy)
        return found

    def shape(self, key: str) -> Shape:
        """Return the shape of a weight without padding."""
        vocab_size = self.model.language.vocab_size
        assert vocab_size is not None
        return real_shape(key, self.records.stored[key].shape, self.model, vocab_size=vocab_size)

    def is_kept(self, key: str) -> bool:
        """Return whether the sidecar has all tensors of a weight, unchanged."""
        return all(name in self.kept.tensors for name in self.table[key].hf_names)

    def values(self, key: str, start: int, stop: int) -> Tensor:
        """Return rows [start, stop) of a megavlm weight at full precision, with adapters of experts merged."""
        shape, experts = self.shape(key), key in self.adapters and self.adapters[key].of_experts
        if self.is_kept(key):
            rows = (slice(start, stop), *(slice(0, size) for size in shape[1:]))
            values = slice_of(self.kept, self.table[key], shape, rows)
        else:
            values = self.records.read(key, start, stop)[(slice(None), *map(slice, shape[1:]))]
        if experts and self.merged is not None:
            return folded(values, experts, slice(start, stop), self.merged)
        return values

    def pieces(self, key: str, start: int, stop: int) -> Iterator[tuple[str, int, Tensor]]:
        """Yield (Hugging Face name, first row, values) for rows [start, stop) of a megavlm weight, adapters merged.

        The values have the type in which the tensor is written.
        """
        rule, held = self.table[key], self.adapters.get(key)
        pairs = held.by_hf_name(rule) if held is not None and held.of_experts is None else {}
        for name, rows, values in pieces_of(rule, self.values(key, start, stop), start, self.shape(key)):
            if name in pairs and self.merged is not None:
                values = folded(values, pairs[name], rows, self.merged)
            yield name, rows.start, values.to(DTYPES[self.declared[name][0]])

    def runs(self, key: str) -> Iterator[tuple[str, int, int]]:
        """Yield (key, start, stop), the arguments of `pieces`, for each range of rows that is copied at once."""
        stored, height = self.records.stored[key], self.shape(key)[0]
        rows = max(1, PIECE_BYTES // (math.prod(stored.shape[1:]) * stored.dtype.itemsize))
        if isinstance(self.table[key], Transpose):
            rows = height
        return ((key, start, min(start + rows, height)) for start in range(0, height, rows))

    def whole(self, key: str) -> Tensor:
        """Return a megavlm weight in fp32, rounded to the type in which it is written."""
        shape = self.shape(key)
        values = self.values(key, 0, shape[0]).float()
        for name, _, rows in pieces_of(self.table[key], values, 0, shape):
            rows.copy_(rows.to(DTYPES[self.declared[name][0]]))
        return values


def export(
    checkpoint: Path,
    sidecar: Sidecar,
    model: ModelConfig,
    out: Path,
    *,
    part: str | None = None,
    merged: LoraConfig | None = None,
    averaged: bool = False,
) -> None:
    """Export a checkpoint to the folder `out`, complete or not at all. With `merged`, fold adapters into their weights.
    With `averaged`, trained weights are their averages (`--ema-decay`). With `part`, write this part's weights alone.

    Raises UserError if the checkpoint lacks tensors, or has adapters and `merged` is None, or if `out` exists.
    """
    records = TrainedReader(checkpoint, averaged=averaged)
    source = Exported.of(records, checkpoint, sidecar, model, part=part, merged=merged)
    table = source.table
    if merged is None and any(map(is_model_adapter, records.stored)):
        raise UserError(f"{checkpoint} has adapters: use merge-lora for whole weights, or export-lora for the adapters")
    if out.exists():
        raise UserError(f"{out} exists: choose another folder, or remove it")
    read = [key for key in table if not source.is_kept(key)]
    records.verify(read)
    files = _files(source.declared, sidecar)
    temporary = out.with_name(f"tmp-{out.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    with ExitStack() as stack:
        writers = {file: stack.enter_context(StreamedFile(temporary / file, held)) for file, held in files.items()}
        writer_of = {name: writers[file] for file, held in files.items() for name in held}

        def write(name: str, values: Tensor, *, first_row: int) -> None:
            for each in (name, *source.copies.get(name, ())):
                writer_of[each].write(each, values, first_row=first_row)

        def move(run: tuple[str, int, int]) -> None:
            for name, first_row, values in source.pieces(*run):
                write(name, values, first_row=first_row)

        made = [*read, *(key for key in source.adapters if source.is_kept(key))]
        for_each(move, (run for key in made for run in source.runs(key)))
        written = {name for key in made for name in table[key].hf_names}
        for name in source.kept.tensors.keys() - written:
            source.kept.copy(name, partial(write, name))
    _write_rest(temporary, files, sidecar)
    if objective_of(model).embeds and part is None:
        write_embedding_files(temporary, model, _scores(records, model))
    rename_flushed(temporary, out)


def export_run(source: Path, out: Path, *, merge: bool, averaged: bool) -> None:
    """Export a run or checkpoint to the folder `out`. A model with a sidecar for each part gets a folder for each part,
    which --vision-from, --projector-from and --language-from read. With `merge`, merge adapters into the weights.

    Raises UserError for a run without a sidecar, for `merge` without adapters, or if `out` exists.
    """
    checkpoint = folders.resolve(source)
    saved = model_of(read_summary(checkpoint), checkpoint)
    if merge and not saved.lora.rank:
        raise UserError(f"{source} has no adapters to merge: use export")
    merged = saved.lora if merge else None
    parts = sidecars(checkpoint)
    if not parts.keys() - {""}:
        export(checkpoint, exportable(source)[1], saved.model, out, merged=merged, averaged=averaged)
        return
    if out.exists():
        raise UserError(f"{out} exists: choose another folder, or remove it")
    temporary = out.with_name(f"tmp-{out.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    for part, sidecar in parts.items():
        export(checkpoint, sidecar, saved.model, temporary / part, part=part, merged=merged, averaged=averaged)
    write_file_of_parts(temporary, saved.model)
    if objective_of(saved.model).embeds:
        records = TrainedReader(checkpoint, averaged=averaged)
        write_embedding_file(temporary, saved.model.objective, _scores(records, saved.model))
    rename_flushed(temporary, out)


def _scores(records: TrainedRecords, model: ModelConfig) -> dict[str, float]:
    """Return the scalars by which an embedding model's loss turns cosines into scores, learned or as given: the
    temperature that divides cosines, and the bias of a sigmoid loss. Return {} for the loss of an extension.
    """
    options = model.objective
    if options.kind not in OBJECTIVES:
        return {}
    keys = {name: f"{OUTPUT}.{name}" for name in learned_scalars(model)}
    records.verify(keys.values())
    learned = {name: float(records.read(key, 0, 1)) for name, key in keys.items()}
    found = {"temperature": 1 / float(scale_of(torch.tensor(list(learned.values())), options))}
    if options.kind == "sigmoid":
        found["sigmoid_bias"] = learned.get("logit_bias", options.sigmoid_bias)
    return found


def _files(declared: Declared, sidecar: Sidecar) -> dict[str, Declared]:
    """Return the tensors of each file, divided as in the original files or, if these are not known, by size.

    A reward head that the original files lack goes into the last file.
    """
    file_of = dict(sidecar.file_of)
    if file_of and SCORE in declared:
        file_of.setdefault(SCORE, max(file_of.values()))
    if file_of and file_of.keys() != declared.keys():
        differing = sorted(file_of.keys() ^ declared.keys())
        raise UserError(
            f"{sidecar.path / TENSORS} and the checkpoint have different tensors, as {differing[0]!r:.80}: the folder "
            "is damaged"
        )
    files: dict[str, Declared] = {}
    for name, file in (file_of or _cut(declared)).items():
        files.setdefault(file, {})[name] = declared[name]
    return files


def _cut(declared: Declared) -> dict[str, str]:
    """Return the file of each tensor: files hold at most FILE_BYTES and have Transformers' names."""
    number_of, size, number = {}, 0, 1
    for name, tensor in declared.items():
        if size and size + _bytes(tensor) > FILE_BYTES:
            size, number = 0, number + 1
        size += _bytes(tensor)
        number_of[name] = number
    if number == 1:
        return dict.fromkeys(declared, "model.safetensors")
    return {name: f"model-{at:05}-of-{number:05}.safetensors" for name, at in number_of.items()}


def _bytes(tensor: tuple[str, tuple[int, ...]]) -> int:
    dtype, shape = tensor
    return math.prod(shape) * DTYPES[dtype].itemsize


def _write_rest(folder: Path, files: Mapping[str, Declared], sidecar: Sidecar) -> None:
    """Copy the files without weights. For several weight files, write their index, or correct its total size."""
    copy_kept(sidecar.files, folder)
    if len(files) > 1:
        size = sum(_bytes(tensor) for held in files.values() for tensor in held.values())
        weight_map = {name: file for file, held in files.items() for name in held}
        index: dict[str, Any] = read_json(folder / INDEX) if (folder / INDEX).exists() else {}
        metadata = index["metadata"] if isinstance(index.get("metadata"), dict) else {}
        if metadata.get("total_size") != size or index.get("weight_map") != weight_map:
            index |= {"metadata": {**metadata, "total_size": size}, "weight_map": weight_map}
            replace_file(folder / INDEX, json.dumps(index, indent=2, sort_keys=True) + "\n")
