"""What a Hugging Face folder holds besides the weights we train: kept beside them, so that an export gives it back.

`hf/` in a run or checkpoint has config.json and the files of tokenizer and processor (`files/`), the tensors that we do
not run (`unused.safetensors`), and which of their files each tensor was in (`tensors.json`).
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

from megavlm.checkpoint.hf.files import read_json
from megavlm.checkpoint.hf.pretrained import Pretrained
from megavlm.checkpoint.hf.safetensors_writer import StreamedFile

NAME, FILES = "hf", "files"
UNUSED, TENSORS = "unused.safetensors", "tensors.json"
KEPT = (".json", ".txt", ".model", ".jinja", ".tiktoken")  # never *.py: an export must not hand on code


@dataclass(frozen=True)
class Sidecar:
    """The kept part of a folder, read back."""

    path: Path
    files: Path  # copied as they were
    variant: int  # index of the family's name_prefixes that its files use
    file_of: dict[str, str]  # tensor → file, in the order of the files


def write_sidecar(pretrained: Pretrained, parent: Path) -> None:
    """Copy what an export will need to `parent`/hf, streaming."""
    target = parent / NAME
    (target / FILES).mkdir(parents=True, exist_ok=True)
    for file in sorted(pretrained.folder.path.iterdir()):
        if file.is_file() and file.suffix in KEPT:
            shutil.copyfile(file, target / FILES / file.name)
    tensors = pretrained.folder.tensors
    with StreamedFile(
        target / UNUSED, {name: (tensors[name].dtype, tensors[name].shape) for name in pretrained.unused}
    ) as out:
        for name in pretrained.unused:
            out.write(name, pretrained.folder.read(name, slice(None)))
    listing = {"spelling": pretrained.variant, "files": {name: info.file for name, info in tensors.items()}}
    (target / TENSORS).write_text(json.dumps(listing, indent=1) + "\n")


def carry_sidecar(checkpoint: Path, run_dir: Path) -> None:
    """Give a run that starts from a checkpoint what that one kept of Hugging Face, if it came from there."""
    sidecar = read_sidecar(checkpoint)
    if sidecar is not None and sidecar.path.parent != run_dir:
        shutil.copytree(sidecar.path, run_dir / NAME, dirs_exist_ok=True)


def read_sidecar(checkpoint: Path) -> Sidecar | None:
    """What was kept beside a checkpoint or in its run, if that came from Hugging Face."""
    found = [parent / NAME for parent in (checkpoint, checkpoint.parent.parent) if (parent / NAME / TENSORS).is_file()]
    if not found:
        return None
    path = found[0]
    listing = read_json(path / TENSORS)
    return Sidecar(path, path / FILES, variant=listing["spelling"], file_of=listing["files"])
