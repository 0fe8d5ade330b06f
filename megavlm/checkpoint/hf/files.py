"""A Hugging Face folder on disk: its config, which file holds which tensor, and slices of them. safetensors only."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from megavlm.checkpoint.hf.settings import Settings
from megavlm.errors import UserError

INDEX = "model.safetensors.index.json"
KEPT_BYTES = 256 * 2**20
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


@dataclass(frozen=True)
class TensorInfo:
    """What a file says of a tensor, without its values."""

    file: str
    shape: tuple[int, ...]
    dtype: str  # safetensors' spelling: F32, BF16, …


class HfFolder:
    """Reads names, shapes and slices.

    Files are mapped into memory, where every page that was read stays resident as long as its file is open. So files
    are let go after each KEPT_BYTES: a tensor that is still in use keeps its own file alive.
    """

    def __init__(self, path: Path) -> None:
        """Raises UserError where there is no folder, no config.json, or nothing but pickles."""
        self.path = path
        if not path.is_dir():
            raise UserError(f"{path} is no folder: give a Hugging Face checkpoint that lies on this machine")
        self.files = _weight_files(path)
        self.close()

    def close(self) -> None:
        """Let the files go; reading opens them again."""
        self._handles: dict[str, Any] = {}
        self._read_bytes = 0

    @cached_property
    def settings(self) -> Settings:
        """config.json."""
        file = self.path / "config.json"
        return Settings(read_json(file), str(file))

    @cached_property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every tensor of the folder, in the order of the files."""
        found: dict[str, TensorInfo] = {}
        for file in self.files:
            handle = self._handle(file)
            for name in handle.keys():  # noqa: SIM118 - no mapping
                part = handle.get_slice(name)
                if name in found:
                    raise UserError(f"{self.path}: {name} is in {found[name].file} and again in {file}: remove one")
                found[name] = TensorInfo(file, tuple(part.get_shape()), part.get_dtype())
        self.close()
        return found

    def read(self, name: str, rows: slice) -> Tensor:
        """Rows of a tensor, in the file's type and trailing shape."""
        info = self.tensors[name]
        if self._read_bytes > KEPT_BYTES:
            self.close()
        handle = self._handle(info.file)
        tensor: Tensor = handle.get_slice(name)[rows] if info.shape else handle.get_tensor(name)
        self._read_bytes += tensor.nbytes
        return tensor

    def _handle(self, file: str) -> Any:
        handles = self._handles
        if file not in handles:
            try:
                handles[file] = safe_open(str(self.path / file), framework="pt")
            except (OSError, SafetensorError) as error:
                raise UserError(
                    f"{self.path / file} is no complete safetensors file ({error}): copy it again"
                ) from error
        return handles[file]


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object from a file."""
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read as JSON ({error}): the folder is incomplete or damaged") from error
    if not isinstance(values, dict):
        raise UserError(f"{file} is no JSON object: the folder is damaged")
    return values


def _weight_files(path: Path) -> list[str]:
    if (path / INDEX).exists():
        weight_map = read_json(path / INDEX).get("weight_map")
        if not isinstance(weight_map, dict):
            raise UserError(f"{path / INDEX} has no weight_map: the folder is damaged")
        files = list(dict.fromkeys(map(str, weight_map.values())))
        for file in files:
            # A name from a file is data: it must not lead out of the folder.
            if Path(file).name != file or not (path / file).is_file():
                raise UserError(f"{path / INDEX} names {file!r}, which is not in the folder: complete the download")
        return files
    files = sorted(file.name for file in path.glob("*.safetensors"))
    if not files and any(next(path.glob(pattern), None) for pattern in _PICKLES):
        raise UserError(
            f"{path} holds pickled weights only, and unpickling can run code: save it again as safetensors "
            "(Transformers: model.save_pretrained(folder))"
        )
    if not files:
        raise UserError(f"{path} holds no *.safetensors: give a folder with a Hugging Face checkpoint")
    return files
