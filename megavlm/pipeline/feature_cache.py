"""Disk cache of a frozen encoder's features, shared by processes and runs.

A file's name is the hash of everything that its features depend on: the encoder's weights and configuration, and the
image's patches, which are its pixels after preprocessing and augmentation. A file is written under a temporary name and
renamed when complete; its checksum is verified on each read. Any number of runs may share a folder: they write the same
bytes under the same name, and a file that another process evicts is a cache miss.
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
from megavlm.files import replace_file

_KEPT_AFTER_CLEANING = 0.9  # fraction of the size limit: evicting more than needed avoids a directory scan per new file


class FeatureCache:
    """Maps hashes of images to features [F, N, H]; keeps at most `size` bytes on disk."""

    def __init__(self, folder: Path, *, size: int, encoder: bytes, writers: int = 1) -> None:
        """Open or create a folder; `encoder` is the `encoder_hash`, and `writers` the number of processes of this run
        that store features. Raises UserError if the folder is not writable.
        """
        self._folder = folder
        self._size = size
        self._encoder = encoder
        self._writers = writers
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._bytes = sum(size for _, size, _ in _files(folder))
        except OSError as error:
            raise UserError(f"--vision-cache {folder} cannot be used ({error.strerror}): choose another") from error

    def key(self, patches: Tensor, layout: object) -> str:
        """Return the key of an image: the hash of encoder, patches [P, D] and their layout (grids, tile groups)."""
        digest = hashlib.sha256(self._encoder)
        digest.update(repr((layout, patches.dtype, tuple(patches.shape))).encode())
        digest.update(_raw(patches))
        return digest.hexdigest()

    def get(self, key: str) -> Tensor | None:
        """Return the features of a key, or None if the file is missing or damaged; a damaged file is deleted."""
        path = self._path(key)
        try:
            with safe_open(path, framework="pt") as file:
                features: Tensor = file.get_tensor("features")
                intact = (file.metadata() or {}).get("sha256") == hashlib.sha256(_raw(features)).hexdigest()
            if intact:
                os.utime(path)  # the modification time is the time of last use, for eviction
                return features
            path.unlink(missing_ok=True)
        except (FileNotFoundError, RuntimeError):
            pass  # another process evicted it between opening and mapping (torch maps the file by its name)
        except (SafetensorError, OSError):
            path.unlink(missing_ok=True)
        return None

    def put(self, key: str, features: Tensor) -> None:
        """Store features. If the disk is full they are not stored, and the run continues."""
        values = features.detach().cpu().contiguous()
        data = save({"features": values}, {"sha256": hashlib.sha256(_raw(values)).hexdigest()})
        path = self._path(key)
        try:
            path.parent.mkdir(exist_ok=True)
            replace_file(path, data)
        except OSError:
            return
        self._bytes += len(data) * self._writers  # the others write as much, at a guess
        if self._bytes > self._size:
            self._clean()

    def _path(self, key: str) -> Path:
        return self._folder / key[:2] / f"{key}.safetensors"

    def _clean(self) -> None:
        """Evict the least recently used files, including those of other runs, if all take more than the limit."""
        files = sorted(_files(self._folder), key=lambda file: file[2])
        self._bytes = sum(size for _, size, _ in files)
        if self._bytes <= self._size:
            return
        for path, size, _ in files:
            if self._bytes <= _KEPT_AFTER_CLEANING * self._size:
                return
            path.unlink(missing_ok=True)
            self._bytes -= size


def encoder_hash(parameters: Iterable[tuple[str, Tensor]], configuration: Mapping[str, object]) -> bytes:
    """Return the hash of all weights with their names and types, and of the configuration of the encoder."""
    digest = hashlib.sha256(repr(sorted(configuration.items())).encode())
    for name, value in parameters:
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(_raw(value))
    return digest.digest()


def _raw(values: Tensor) -> memoryview:
    flat = values.detach().cpu().contiguous().flatten()
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


def _files(folder: Path) -> list[tuple[Path, int, float]]:
    """Return (path, bytes, time of last use) of all complete files; files deleted meanwhile are omitted."""
    found = []
    for path in folder.glob("??/*.safetensors"):
        try:
            status = path.stat()
        except FileNotFoundError:
            continue
        found.append((path, status.st_size, status.st_mtime))
    return found
