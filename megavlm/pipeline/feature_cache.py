"""Features of a frozen encoder on disk: what an image became once, it becomes again, in this run and in any other.

A file is named after the hash of all that its features depend on: the encoder's weights and configuration, and the
image's patches, which are its pixels after preprocessing and augmentation. It is complete when it has its name (written
under another one, then renamed), holds a checksum of its numbers, and is not believed without. Processes of any number
of runs may share a folder: they write the same bytes under the same name, and a file that another process deletes is
merely not there.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from megavlm.errors import UserError

_KEPT_AFTER_CLEANING = 0.9  # of the size: so that not every new file starts a look at all of them


class FeatureCache:
    """Features [F, N, H] by the hash of what they are of, at most `size` bytes of them on disk."""

    def __init__(self, folder: Path, *, size: int, encoder: bytes) -> None:
        """`encoder` stands for weights and configuration (`encoder_hash`). Raises UserError for a folder that cannot
        be written.
        """
        self._folder = folder
        self._size = size
        self._encoder = encoder
        self.hits = self.misses = 0
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._bytes = sum(size for _, size, _ in _files(folder))
        except OSError as error:
            raise UserError(f"--vision-cache {folder} cannot be used ({error.strerror}): choose another") from error

    def key(self, patches: Tensor, layout: object) -> str:
        """Name of what an image becomes: its patches [P, D] and how they lie (grids, tile groups)."""
        digest = hashlib.sha256(self._encoder)
        digest.update(repr((layout, patches.dtype, tuple(patches.shape))).encode())
        digest.update(_raw(patches))
        return digest.hexdigest()

    def get(self, key: str) -> Tensor | None:
        """The features, or None where there are none or what is there is damaged (and then deleted)."""
        path = self._path(key)
        try:
            with safe_open(path, framework="pt") as file:
                features: Tensor = file.get_tensor("features")
                intact = (file.metadata() or {}).get("sha256") == hashlib.sha256(_raw(features)).hexdigest()
            if intact:
                os.utime(path)  # the oldest go first
                self.hits += 1
                return features
            path.unlink(missing_ok=True)
        except (FileNotFoundError, RuntimeError):
            pass  # another process made room: torch maps the file by its name, after safetensors has opened it
        except (SafetensorError, OSError):
            path.unlink(missing_ok=True)
        self.misses += 1
        return None

    def put(self, key: str, features: Tensor) -> None:
        """Keep features. A full disk is no reason to stop: then they are not kept."""
        values = features.detach().cpu().contiguous()
        data = save({"features": values}, {"sha256": hashlib.sha256(_raw(values)).hexdigest()})
        path = self._path(key)
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            path.parent.mkdir(exist_ok=True)
            temporary.write_bytes(data)
            os.replace(temporary, path)
        except OSError:
            temporary.unlink(missing_ok=True)
            return
        self._bytes += len(data)
        if self._bytes > self._size:
            self._clean()

    def _path(self, key: str) -> Path:
        return self._folder / key[:2] / f"{key}.safetensors"

    def _clean(self) -> None:
        """Delete what was not used for longest, whoever wrote it."""
        files = sorted(_files(self._folder), key=lambda file: file[2])
        self._bytes = sum(size for _, size, _ in files)
        for path, size, _ in files:
            if self._bytes <= _KEPT_AFTER_CLEANING * self._size:
                return
            path.unlink(missing_ok=True)
            self._bytes -= size


def encoder_hash(parameters: Iterable[tuple[str, Tensor]], configuration: Mapping[str, object]) -> bytes:
    """Of every weight, its name and its type, and of what else decides the encoder's numbers."""
    digest = hashlib.sha256(repr(sorted(configuration.items())).encode())
    for name, value in parameters:
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(_raw(value))
    return digest.digest()


def _raw(values: Tensor) -> memoryview:
    flat = values.detach().cpu().contiguous().flatten()
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


def _files(folder: Path) -> list[tuple[Path, int, float]]:
    """(path, bytes, time of last use) of every complete file; those that vanish meanwhile are left out."""
    found = []
    for path in folder.glob("??/*.safetensors"):
        try:
            status = path.stat()
        except FileNotFoundError:
            continue
        found.append((path, status.st_size, status.st_mtime))
    return found
