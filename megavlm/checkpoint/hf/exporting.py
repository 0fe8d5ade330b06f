"""Export a megavlm checkpoint as a Hugging Face folder with the files and names that the model came from.

Tensors are copied some rows at a time, so that the model need not fit into memory.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megavlm.arch.layers import OUTPUT, part_of
from megavlm.arch.objectives import OBJECTIVES, learned_scalars, objective_of
from megavlm.checkpoint import folders
from megavlm.checkpoint.folders import rename_flushed
from megavlm.checkpoint.hf.adapters import folded, read_adapters
from megavlm.checkpoint.hf.checkpoint_reader import AveragesReader, CheckpointReader, Stored
from megavlm.checkpoint.hf.embedding_files import write_embedding_file_of_parts, write_embedding_files
from megavlm.checkpoint.hf.files import INDEX, HfFolder
from megavlm.checkpoint.hf.pretrained import copies, refuse, without_output
from megavlm.checkpoint.hf.raw import PIECE_BYTES, for_each
from megavlm.checkpoint.hf.safetensors_writer import DTYPE_NAMES, DTYPES, StreamedFile
from megavlm.checkpoint.hf.sidecar import TENSORS, Sidecar, copy_kept, read_part_sidecars, read_sidecar
from megavlm.checkpoint.hf.sizes import check_size
from megavlm.checkpoint.summary import model_of, read_summary
from megavlm.config.schema import Config, LoraConfig, ModelConfig
from megavlm.errors import UserError
from megavlm.families import family_of
from megavlm.families.shared.family import ALL_PARTS, Family
from megavlm.families.shared.settings import Settings
from megavlm.families.shared.table import Rule, Shape, Stack, Table, Transpose, TransposeEach, row_pairs
from megavlm.json_files import read_json
from megavlm.model.weights import real_shape
from megavlm.objective.contrastive import scale_of
from megavlm.program import program

FILE_BYTES = 5 * 10**9

Declared = dict[str, tuple[str, tuple[int, ...]]]  # Hugging Face name → (type in safetensors' spelling, shape)


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
    """Write the folder `out`, complete or not at all; with `merged`, fold adapters into the weights that they adapt.
    With `averaged`, trained weights are their averages (`--ema-decay`). With `part`, write this part's weights alone.

    Raises UserError if the checkpoint lacks tensors, or has adapters and `merged` is None, or if `out` exists.
    """
    records = AveragesReader(checkpoint) if averaged else CheckpointReader(checkpoint)
    family = family_at(sidecar)
    if sidecar.variant >= len(family.name_prefixes):
        raise UserError(f"{sidecar.path / TENSORS} has no known spelling ({sidecar.variant}): the folder is damaged")
    stored = records.stored
    where = f"{checkpoint} is damaged, or its megavlm.json is another checkpoint's"
    check_size(model, ALL_PARTS, [each.shape for each in stored.values()], where=where)
    table = family.table(model, family.name_prefixes[sidecar.variant])
    if objective_of(model).embeds:  # the weight of the output layer is unused, and goes back as it came
        table = without_output(table)
    if part is not None:
        table = {key: rule for key, rule in table.items() if part_of(key) == part}
    adapters = read_adapters(records, model)
    if adapters and merged is None:
        raise UserError(f"{checkpoint} has adapters: use merge-lora for whole weights, or export-lora for the adapters")
    adapters = {key: held for key, held in adapters.items() if key in table}  # a part may be all that is written
    refuse((f"missing {key}" for key in table.keys() - stored.keys()), f"{checkpoint} cannot be exported")
    if out.exists():
        raise UserError(f"{out} exists: choose another folder, or remove it")
    records.verify(table)
    unused = HfFolder(sidecar.path)
    copies_of = _inverted(copies(table, family.name_prefixes[sidecar.variant].head, model, sidecar.file_of))
    declared = _declared(table, stored, model)
    declared |= {copy: declared[name] for name, made in copies_of.items() for copy in made}
    files = _files(declared, unused, sidecar)
    temporary = out.with_name(f"tmp-{out.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    with ExitStack() as stack:
        writers = {file: stack.enter_context(StreamedFile(temporary / file, held)) for file, held in files.items()}
        writer_of = {name: writers[file] for file, held in files.items() for name in held}
        real = {key: _real(key, stored[key], model) for key in table}
        experts = {key: held.of_experts for key, held in adapters.items() if held.of_experts is not None}
        others = {key: held for key, held in adapters.items() if key not in experts}
        adapted = {name: pair for key, held in others.items() for name, pair in held.by_hf_name(table[key]).items()}

        def put(rule: Rule, values: Tensor, start: int, shape: Shape) -> None:
            """Write rows of a tensor of this shape, from row `start` on."""
            if isinstance(rule, Stack):
                for number, each in enumerate(values, start):
                    put(rule.rules[number], each, 0, shape[1:])
                return
            for pair in row_pairs(rule.hf_rows(shape), start, start + len(values)):
                rows = values[pair.rows]
                if isinstance(rule, (Transpose, TransposeEach)):
                    rows = rows.mT.contiguous()
                if merged is not None and pair.hf_name in adapted:
                    rows = folded(rows, adapted[pair.hf_name], pair.hf_rows, merged)
                for name in (pair.hf_name, *copies_of.get(pair.hf_name, ())):
                    writer_of[name].write(name, rows, first_row=pair.hf_rows.start)

        def move(run: _Run) -> None:
            shape = real[run.key]
            values = records.read(run.key, run.start, run.stop)[(slice(None), *map(slice, shape[1:]))]
            if merged is not None and run.key in experts:
                values = folded(values, experts[run.key], slice(run.start, run.stop), merged)
            put(table[run.key], values, run.start, shape)

        for_each(move, (run for key, shape in real.items() for run in _runs(key, shape, stored[key], table[key])))
        for name in unused.tensors:
            writer_of[name].write(name, unused.read(name, slice(None)))
    _write_rest(temporary, files, sidecar)
    if objective_of(model).embeds and part is None:
        write_embedding_files(temporary, model, _scores(records, model))
    rename_flushed(temporary, out)


def export_run(source: Path, out: Path, *, merge: bool, averaged: bool) -> None:
    """Write the folder `out` from a run or checkpoint: of a model that consists of parts, a folder for each of them,
    which --vision-from, --projector-from and --language-from read. With `merge`, fold its adapters into weights.

    Raises UserError for a run that no folder of Hugging Face files belongs to, or if `out` exists.
    """
    checkpoint = folders.resolve(source)
    saved = model_of(read_summary(checkpoint), checkpoint)
    if merge and not saved.lora.rank:
        raise UserError(f"{source} has no adapters to merge: use export")
    merged = saved.lora if merge else None
    parts = read_part_sidecars(checkpoint)
    if not parts:
        export(checkpoint, exportable(source)[1], saved.model, out, merged=merged, averaged=averaged)
        return
    if out.exists():
        raise UserError(f"{out} exists: choose another folder, or remove it")
    temporary = out.with_name(f"tmp-{out.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    for part, sidecar in parts.items():
        export(checkpoint, sidecar, saved.model, temporary / part, part=part, merged=merged, averaged=averaged)
    if objective_of(saved.model).embeds:
        records = AveragesReader(checkpoint) if averaged else CheckpointReader(checkpoint)
        write_embedding_file_of_parts(temporary, saved.model, _scores(records, saved.model))
    rename_flushed(temporary, out)


def _scores(records: CheckpointReader, model: ModelConfig) -> dict[str, float]:
    """Return what makes scores of cosines in the loss of a model that embeds, as trained or as given: the temperature
    that divides them, and the bias of a sigmoid loss. A loss of an extension has its own.
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


def exportable(source: Path) -> tuple[Path, Sidecar, Config]:
    """Return a run's or checkpoint's folder, its Hugging Face sidecar, and its model's and adapters' configuration.

    Raises UserError for a run that no folder of Hugging Face files belongs to.
    """
    checkpoint = folders.resolve(source)
    sidecar = read_sidecar(checkpoint)
    if read_part_sidecars(checkpoint):
        raise UserError(
            f"{source} consists of parts that no model of Transformers has together: use "
            f"{program('convert')} export, or merge-lora with adapters, which write a folder for each"
        )
    if sidecar is None:
        raise UserError(
            f"{source} did not start from a Hugging Face folder, so it has no config.json to export: only "
            "runs that started with --init-from or an imported checkpoint can be exported"
        )
    return checkpoint, sidecar, model_of(read_summary(checkpoint), checkpoint)


def _inverted(copies: Mapping[str, str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for copy, name in copies.items():
        found.setdefault(name, []).append(copy)
    return found


def family_at(sidecar: Sidecar) -> Family:
    """Return the family that a run's copy of config.json belongs to."""
    file = sidecar.files / "config.json"
    return family_of(Settings(read_json(file), str(file)))


class _Run(NamedTuple):
    """Rows [start, stop) of the tensor `key`, which are copied in one piece."""

    key: str
    start: int
    stop: int


def _runs(key: str, real: tuple[int, ...], stored: Stored, rule: Rule) -> Iterator[_Run]:
    rows = max(1, PIECE_BYTES // (math.prod(stored.shape[1:]) * stored.dtype.itemsize))
    if isinstance(rule, Transpose):
        rows = real[0]
    return (_Run(key, start, min(start + rows, real[0])) for start in range(0, real[0], rows))


def _real(key: str, stored: Stored, model: ModelConfig) -> tuple[int, ...]:
    assert model.language.vocab_size is not None
    return real_shape(key, stored.shape, model, vocab_size=model.language.vocab_size)


def _declared(table: Table, stored: Mapping[str, Stored], model: ModelConfig) -> Declared:
    return {
        name: (DTYPE_NAMES[stored[key].dtype], shape)
        for key, rule in table.items()
        for name, shape in rule.hf_shapes(_real(key, stored[key], model)).items()
    }


def _files(declared: Declared, unused: HfFolder, sidecar: Sidecar) -> dict[str, Declared]:
    """Return the tensors of each file in the order of the original files; without original files, cut by size."""
    declared = {**declared, **{name: (info.dtype, info.shape) for name, info in unused.tensors.items()}}
    if sidecar.file_of and sidecar.file_of.keys() != declared.keys():
        differing = sorted(sidecar.file_of.keys() ^ declared.keys())
        raise UserError(
            f"{sidecar.path / TENSORS} and the checkpoint have different tensors, as {differing[0]!r:.80}: the folder "
            "is damaged"
        )
    files: dict[str, Declared] = {}
    for name, file in (sidecar.file_of or _cut(declared)).items():
        files.setdefault(file, {})[name] = declared[name]
    return files


def _cut(declared: Declared) -> dict[str, str]:
    """Return the file of each tensor: files hold at most FILE_BYTES and are named as Transformers names them."""
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
    """Copy the files without weights, and correct the types and sizes in them where training changed those."""
    copy_kept(sidecar.files, folder)
    tensors = [tensor for held in files.values() for tensor in held.values()]
    size = sum(map(_bytes, tensors))
    if len(files) > 1:
        weight_map = {name: file for file, held in files.items() for name in held}
        index: dict[str, Any] = read_json(folder / INDEX) if (folder / INDEX).exists() else {"weight_map": weight_map}
        said = index.get("metadata") or {}
        if not isinstance(said, dict) or said.get("total_size") != size:
            index["metadata"] = {**(said if isinstance(said, dict) else {}), "total_size": size}
            (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    floating = {dtype for dtype, _ in tensors if DTYPES[dtype].is_floating_point}
    config = read_json(folder / "config.json")
    key = "dtype" if "dtype" in config else "torch_dtype"
    if len(floating) == 1 and key in config:
        dtype = str(DTYPES[floating.pop()]).removeprefix("torch.")
        if config[key] != dtype:
            (folder / "config.json").write_text(json.dumps({**config, key: dtype}, indent=2, sort_keys=True) + "\n")
