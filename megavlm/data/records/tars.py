"""Folders of tars, made ready for megatron-energon: an index beside each tar and `.nv-meta` that lists them.

energon's own preparation gives up on a folder with one damaged tar. Here what can be read is indexed, and the damage
is a last sample of its tar that cannot be read: it is met, counted and skipped when its turn comes.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import struct
import tarfile
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

META = ".nv-meta"
_INFO = (".info.json", ".info.yaml")
_READERS = 8  # tars that are indexed at once: waiting for a disk or a network takes most of the time
_KEY = re.compile(r"((?:.*/)?[^./]+)\.[^/]*$")  # up to the first dot of the name, as WebDataset has it
_NO_SAMPLE = re.compile(r"__[^/]*__(/|$)")
_DATASET = "__module__: megatron.energon\n__class__: CrudeWebdataset\n"


def is_prepared(folder: Path) -> bool:
    return any((folder / META / name).is_file() for name in _INFO)


def tars_below(folder: Path) -> list[str]:
    """Names of the tars in `folder` and its subfolders, relative to it, sorted."""
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.tar"))


def home_of(path: Path, *, cache: Path) -> Path:
    """Where energon reads the tars of `path`, a folder or one tar: there, or at links below `cache`, once prepared."""
    return path if path.is_dir() and is_prepared(path) else cache / _short(path)


def prepare(path: Path, *, cache: Path, log: Callable[[str], None] = lambda _: None) -> None:
    """Index the tars of `path`, unless that is done: in the folder itself where it can be written to, else in `cache`.

    Raises ValueError where there are no tars, or no samples in them.
    """
    if is_prepared(home_of(path, cache=cache)):
        return
    folder, names = (path, tars_below(path)) if path.is_dir() else (path.parent, [path.name])
    if not names:
        raise ValueError("has no tars")
    log(f"indexing {len(names)} tars of {path}, once")
    if path.is_dir() and _is_writable(path):
        index(path, names)
    else:
        index(_links(folder, names, cache / _short(path)), names)


def index(folder: Path, names: Sequence[str]) -> None:
    """Write what energon needs to read the tars `names` of `folder`; tars without samples are left out."""
    with ThreadPoolExecutor(_READERS) as pool:
        counts = dict(zip(names, pool.map(lambda name: _index_tar(folder / name), names), strict=True))
    counts = {name: count for name, count in counts.items() if count}
    if not counts:
        raise ValueError("has tars without any sample")
    meta = folder / META
    meta.mkdir(exist_ok=True)
    split = {"split_parts": {"train": list(counts)}, "exclude": []}
    _write(meta / "split.yaml", json.dumps(split, indent=1).encode())  # JSON is YAML
    _write(meta / "dataset.yaml", _DATASET.encode())
    _write(meta / _INFO[0], json.dumps({"shard_counts": counts}, indent=1).encode())  # last: what makes it prepared


def sample_offsets(path: Path) -> list[int]:
    """Bytes at which the samples of a tar begin, and where the last one ends; [] for an archive of none.

    Where the tar breaks off or becomes unreadable, a last sample stands for all that is lost.
    """
    starts: list[int] = []
    size = path.stat().st_size
    try:
        with tarfile.open(path, "r:") as tar:
            key = None
            while (member := tar.next()) is not None:
                tar.members = []  # type: ignore[attr-defined]  # else it keeps each
                own = _KEY.match(member.name)
                if member.isreg() and own and own[1] != key and not _NO_SAMPLE.match(member.name):
                    starts.append(member.offset)
                    key = own[1]
                if tar.offset > size:
                    raise tarfile.ReadError("a member is longer than the tar")
            end = tar.offset
            with path.open("rb") as file:
                file.seek(end)
                if not file.read(tarfile.BLOCKSIZE).strip(b"\0"):
                    return [*starts, end] if starts else []
                starts.append(end)  # no header, and not the end either
    except tarfile.TarError:  # the last sample breaks off
        starts = starts or [0]
    return [*starts, size]


def _index_tar(path: Path) -> int:
    """Write the index of a tar, unless a newer one is there; the number of samples."""
    target = path.with_suffix(".tar.idx")
    with suppress(OSError):
        if target.stat().st_mtime_ns >= path.stat().st_mtime_ns and target.stat().st_size >= 16:
            return target.stat().st_size // 8 - 1
    offsets = sample_offsets(path)
    assert all(start <= end for start, end in pairwise(offsets))
    _write(target, struct.pack(f"<{len(offsets)}Q", *offsets))
    return max(len(offsets) - 1, 0)


def _write(path: Path, data: bytes) -> None:
    """In one step: a reader never sees half a file."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")  # others may do the same
    temporary.write_bytes(data)
    temporary.replace(path)


def _is_writable(folder: Path) -> bool:
    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def _links(folder: Path, names: Sequence[str], home: Path) -> Path:
    for name in names:
        link = home / name
        link.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            link.symlink_to((folder / name).resolve())
    return home


def _short(path: Path) -> str:
    return f"{path.stem}-{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:8]}"
