"""Keep what a Hugging Face folder holds besides the trained weights, so that an export gives it back.

The folder `hf/` of a run or checkpoint has config.json and the files of tokenizer and processor (`files/`), the tensors
that the model does not use (`unused.safetensors`), and the original file of each tensor (`tensors.json`).
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from megavlm.checkpoint.hf.pretrained import Pretrained
from megavlm.checkpoint.hf.safetensors_writer import StreamedFile
from megavlm.errors import UserError
from megavlm.families.shared.family import ALL_PARTS
from megavlm.json_files import TEXT, check, mapped, read_json, whole
from megavlm.paths import Escapes, copy_files, inside, plain

NAME, FILES = "hf", "files"
UNUSED, TENSORS = "unused.safetensors", "tensors.json"
KEPT = (".json", ".txt", ".model", ".jinja", ".tiktoken")  # never *.py: an export must not hand on code


@dataclass(frozen=True)
class Sidecar:
    """The content of a folder `hf/`."""

    path: Path
    files: Path  # the folder of files that were copied as they are
    variant: int  # index of the family's name_prefixes that its files use
    file_of: dict[str, str]  # tensor → file, in the order of the files


def write_sidecar(pretrained: Pretrained, target: Path) -> None:
    """Copy what an export will need to the folder `target`, one tensor at a time."""
    copy_kept(pretrained.folder.path, target / FILES)
    tensors = pretrained.folder.tensors
    with StreamedFile(
        target / UNUSED, {name: (tensors[name].dtype, tensors[name].shape) for name in pretrained.unused}
    ) as out:
        for name in pretrained.unused:
            out.write(name, pretrained.folder.read(name, slice(None)))
    listing = {"spelling": pretrained.variant, "files": {name: info.file for name, info in tensors.items()}}
    (target / TENSORS).write_text(json.dumps(listing, indent=1) + "\n")


def copy_kept(source: Path, target: Path) -> None:
    """Copy the files that an export returns unchanged. Raises UserError for a link that leads out of `source`."""
    try:
        copy_files(source, target, suffixes=KEPT)
    except Escapes as error:
        raise UserError(f"{error}: put the file there itself, or remove the link") from error


def carry_sidecar(checkpoint: Path, run_dir: Path) -> None:
    """Copy the folder `hf/` of a checkpoint, if it has one, to the run that starts from it."""
    whole = read_sidecar(checkpoint)
    found = {"": whole} if whole is not None else read_part_sidecars(checkpoint)
    for part, sidecar in found.items():
        target = run_dir / NAME / part
        if sidecar.path != target:
            copy_kept(sidecar.files, target / FILES)
            for name in (TENSORS, UNUSED):
                shutil.copyfile(sidecar.path / name, target / name)


def read_sidecar(checkpoint: Path) -> Sidecar | None:
    """Return the content of `hf/` in a checkpoint or in its run; None if the model is not from Hugging Face.

    Raises UserError if it is damaged or names files elsewhere.
    """
    found = (parent for parent in _places(checkpoint) if os.path.lexists(parent / NAME / TENSORS))
    return next((_read(parent, NAME) for parent in found), None)


def read_part_sidecars(checkpoint: Path) -> dict[str, Sidecar]:
    """Return the same of each part, `hf/vision`, `hf/projector` and `hf/language`, of a model that consists of folders
    and that Transformers has no class for; empty if there are none.
    """
    for parent in _places(checkpoint):
        if any(os.path.lexists(parent / NAME / part) for part in ALL_PARTS):
            return {part: _read(parent, NAME, part) for part in ALL_PARTS}
    return {}


def _places(checkpoint: Path) -> tuple[Path, Path]:
    """Return where the folder `hf/` of a checkpoint may be: in it, or in its run."""
    return checkpoint, checkpoint.parent.parent


def _read(path: Path, *names: str) -> Sidecar:
    """Return the content of the folder `path`/`names`…, of which no name may be a link to elsewhere."""
    try:
        for name in names:
            path = inside(path, name, directory=True)
        inside(path, FILES, directory=True)
        listing = read_json(inside(path, TENSORS))
        for file in (path / UNUSED, *(path / FILES).iterdir()):
            inside(file.parent, file.name)
        check(listing, {"spelling": whole(0, 99), "files": mapped(TEXT)}, str(path / TENSORS))
        if listing["files"] is None or listing["spelling"] is None:
            raise KeyError(f"a value of {TENSORS}")
        file_of = dict(listing["files"])
        for file in set(file_of.values()):
            if not plain(file).endswith(".safetensors"):
                raise Escapes(f"{file!r} is no name of a safetensors file")
        return Sidecar(path, path / FILES, variant=listing["spelling"], file_of=file_of)
    except (OSError, Escapes, KeyError) as error:
        raise UserError(f"{path} is damaged ({error}): nothing can be exported from it") from error
