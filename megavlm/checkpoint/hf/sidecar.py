"""Write and read a run's sidecar `hf/`: the files and tensors of a Hugging Face folder that only an export needs.

The folder `hf/` of a run or checkpoint has config.json and the files of tokenizer and processor (`files/`), and tensors
that training does not change (`unused.safetensors`): tensors that the model does not use, and frozen tensors whose
values the run's type would round. `tensors.json` has the original file and type of each tensor.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from megavlm.arch.layers import EMBEDDING, is_trained
from megavlm.checkpoint import folders
from megavlm.checkpoint.hf.hf_files import DTYPE_NAMES, DTYPES, HfFolder, StreamedFile
from megavlm.checkpoint.hf.pretrained import Pretrained
from megavlm.checkpoint.summary import model_of, read_summary
from megavlm.config.schema import Config
from megavlm.errors import UserError
from megavlm.families import family_of
from megavlm.families.shared.family import ALL_PARTS, Family
from megavlm.families.shared.settings import Settings
from megavlm.families.shared.table import Table
from megavlm.files import copy_file, copy_files, replace_file
from megavlm.json_files import TEXT, check, mapped, read_json, whole
from megavlm.paths import Escapes, inside, plain
from megavlm.program import program

NAME, FILES = "hf", "files"
UNUSED, TENSORS = "unused.safetensors", "tensors.json"
_HELD = {"fp32": "F32", "bf16": "BF16", "fp16": "F16"}
Kept = dict[str, tuple[HfFolder, str]]  # name in an export → a tensor of a folder
KEPT = (".json", ".txt", ".model", ".jinja", ".tiktoken")  # never *.py: an export must not hand on code


@dataclass(frozen=True)
class Sidecar:
    """Content of a sidecar: the folder `hf/`, or `hf/PART` for a part of a model."""

    path: Path
    files: Path  # the folder of files that were copied as they are
    variant: int  # index of the family's name_prefixes that the files use
    file_of: dict[str, str]  # tensor → file, in the order of the files
    types: dict[str, str]  # tensor → type, in safetensors' spelling


def write_sidecar(pretrained: Pretrained, target: Path, config: Config) -> None:
    """Write the sidecar of a run that starts from `pretrained`, with this configuration, to the folder `target`."""
    copy_described(pretrained.folder, target / FILES)
    unused: Kept = {name: (pretrained.folder, name) for name in pretrained.unused}
    files = {name: info.file for name, info in pretrained.folder.tensors.items()}
    write_tensors(
        target, [pretrained], pretrained.table, unused=unused, spelling=pretrained.variant, files=files, config=config
    )


def write_tensors(
    target: Path,
    sources: Sequence[Pretrained],
    table: Table,
    *,
    unused: Kept,
    spelling: int,
    files: Mapping[str, str],
    config: Config,
) -> None:
    """Write `tensors.json` and `unused.safetensors` for an export with the tensor names of `table`.

    They have each tensor's type in the source folders, `files` (tensor → file), and the values of `unused` tensors and
    of tensors that the run does not train and would round. Tensors that no folder has (a new projector) get the type
    of the language model.
    """
    kept, types, new = dict(unused), dict[str, str](), list[str]()
    for key, rule in table.items():
        source = next((each for each in sources if each.provides(key) and key in each.table), None)
        names = source.table[key].hf_names if source is not None else ()
        if source is None or any(name not in source.folder.tensors for name in names):
            new += rule.hf_names
            continue
        found = [source.folder.tensors[name].dtype for name in names]
        if len(names) != len(rule.hf_names):  # the source stacks experts in one tensor, the export does not
            types |= dict.fromkeys(rule.hf_names, DTYPE_NAMES[source.dtype_of(key)])
            continue
        types |= dict(zip(rule.hf_names, found, strict=True))
        if _is_rounded(key, found, config) and not source.widens(key, config):
            kept |= {ours: (source.folder, name) for ours, name in zip(rule.hf_names, names, strict=True)}
    words = next((each for each in sources if "language" in each.parts), None)
    if words is not None and f"{EMBEDDING}.word_embeddings.weight" in words.table:
        types |= dict.fromkeys(new, DTYPE_NAMES[words.dtype_of(f"{EMBEDDING}.word_embeddings.weight")])
    infos = {name: folder.tensors[there] for name, (folder, there) in kept.items()}
    with StreamedFile(target / UNUSED, {name: (info.dtype, info.shape) for name, info in infos.items()}) as out:
        for name, (folder, there) in kept.items():
            folder.copy(there, partial(out.write, name))
    listing = {"spelling": spelling, "files": dict(files), "types": types}
    replace_file(target / TENSORS, json.dumps(listing, indent=1) + "\n")


def _is_rounded(key: str, types: Iterable[str], config: Config) -> bool:
    """Return whether a run does not train a weight and would round it: the run's type cannot represent all values of
    `types`, the types of the weight's tensors.
    """
    held = DTYPES[_HELD[config.precision.dtype]]
    return not is_trained(key, config) and any(torch.promote_types(DTYPES[each], held) != held for each in types)


def copy_described(folder: HfFolder, target: Path) -> None:
    """Copy the files of a pretrained folder that an export keeps, without what they say of quantized weights."""
    copy_kept(folder.path, target)
    if folder.settings.values != read_json(target / "config.json"):
        replace_file(target / "config.json", json.dumps(folder.settings.values, indent=2) + "\n")
        (target / "hf_quant_config.json").unlink(missing_ok=True)  # ModelOpt's copy of it


def copy_kept(source: Path, target: Path) -> None:
    """Copy the files that an export keeps unchanged (`KEPT`). Raises UserError for a link to outside of `source`."""
    try:
        copy_files(source, target, suffixes=KEPT)
    except Escapes as error:
        raise UserError(f"{error}: put the file there itself, or remove the link") from error


def carry_sidecar(checkpoint: Path, run_dir: Path) -> None:
    """Copy the sidecars of a checkpoint, if it has any, to `run_dir`, a run that starts from the checkpoint."""
    for part, sidecar in sidecars(checkpoint).items():
        target = run_dir / NAME / part
        if sidecar.path == target:
            continue
        copy_kept(sidecar.files, target / FILES)
        for name in (TENSORS, UNUSED):
            copy_file(sidecar.path / name, target / name)


def sidecars(checkpoint: Path) -> dict[str, Sidecar]:
    """Return the sidecars of a checkpoint or of its run: {"": sidecar} for a model that Transformers has a class for,
    else a sidecar for each part ("vision", …); {} if the model is not from Hugging Face.

    Raises UserError if a sidecar is damaged or names files outside of it.
    """
    places = [parent / NAME for parent in (checkpoint, checkpoint.parent.parent)]
    for place in places:
        if os.path.lexists(place / TENSORS):
            return {"": _read(place.parent, NAME)}
    for place in places:
        if any(os.path.lexists(place / part) for part in ALL_PARTS):
            return {part: _read(place.parent, NAME, part) for part in ALL_PARTS}
    return {}


def exportable(source: Path) -> tuple[Path, Sidecar, Config]:
    """Return a run's or checkpoint's folder, its Hugging Face sidecar, and its model's and adapters' configuration.

    Raises UserError if there is no sidecar, or one for each part of the model.
    """
    checkpoint = folders.resolve(source)
    found = sidecars(checkpoint)
    if found.keys() - {""}:
        raise UserError(
            f"{source} consists of parts that no model of Transformers has together: use "
            f"{program('convert')} export, or merge-lora with adapters, which write a folder for each"
        )
    if not found:
        raise UserError(
            f"{source} did not start from a Hugging Face folder, so it has no config.json to export: only "
            "runs that started with --init-from can be exported"
        )
    return checkpoint, found[""], model_of(read_summary(checkpoint), checkpoint)


def family_at(sidecar: Sidecar) -> Family:
    """Return the model family of a sidecar's config.json."""
    return family_of(settings_at(sidecar))


def settings_at(sidecar: Sidecar) -> Settings:
    """Return the content of a sidecar's config.json."""
    file = sidecar.files / "config.json"
    return Settings(read_json(file), str(file))


def _read(path: Path, *names: str) -> Sidecar:
    """Return the sidecar in the folder `path`/`names`…. Raises UserError if it is damaged or has a link out of it."""
    try:
        for name in names:
            path = inside(path, name, directory=True)
        inside(path, FILES, directory=True)
        listing = read_json(inside(path, TENSORS))
        for file in (path / UNUSED, *(path / FILES).iterdir()):
            inside(file.parent, file.name)
        check(listing, {"spelling": whole(0, 99), "files": mapped(TEXT), "types": mapped(TEXT)}, str(path / TENSORS))
        if listing["files"] is None or listing["spelling"] is None:
            raise KeyError(f"a value of {TENSORS}")
        file_of, types = dict(listing["files"]), dict(listing.get("types") or {})
        if strange := types.keys() and set(types.values()) - DTYPES.keys():
            raise KeyError(f"a type of {TENSORS}: {min(strange)!r:.20}")
        for file in set(file_of.values()):
            if not plain(file).endswith(".safetensors"):
                raise Escapes(f"{file!r} is no name of a safetensors file")
        return Sidecar(path, path / FILES, variant=listing["spelling"], file_of=file_of, types=types)
    except (OSError, Escapes, KeyError) as error:
        raise UserError(f"{path} is damaged ({error}): nothing can be exported from it") from error
