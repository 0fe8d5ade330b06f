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


def write_sidecar(pretrained: Pretrained, parent: Path) -> None:
    """Copy what an export will need to `parent`/hf, one tensor at a time."""
    target = parent / NAME
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
    sidecar = read_sidecar(checkpoint)
    if sidecar is not None and sidecar.path.parent != run_dir:
        target = run_dir / NAME
        copy_kept(sidecar.files, target / FILES)
        for name in (TENSORS, UNUSED):
            shutil.copyfile(sidecar.path / name, target / name)


def read_sidecar(checkpoint: Path) -> Sidecar | None:
    """Return the content of `hf/` in a checkpoint or in its run; None if the model is not from Hugging Face.

    Raises UserError if it is damaged or names files elsewhere.
    """
    for parent in (checkpoint, checkpoint.parent.parent):
        path = parent / NAME
        if os.path.lexists(path / TENSORS):
            break
    else:
        return None
    try:
        inside(parent, NAME, directory=True)
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
