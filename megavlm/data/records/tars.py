"""Prepare folders of tars for megatron-energon: write an index beside each tar and `.nv-meta`, which lists them.

energon's own preparation fails on a folder with one damaged tar. This one indexes what can be read of such a tar and
adds one sample at its end for the rest: that sample cannot be read, so training counts and skips it when it comes.
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
import tarfile
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

from megavlm.data.records.parts import Part, is_clip
from megavlm.files import replace_file
from megavlm.paths import FileRange

META = ".nv-meta"
_INFO = (".info.json", ".info.yaml")
_READERS = 8  # tars that are indexed at once: waiting for a disk or a network takes most of the time
_KEY = re.compile(r"((?:.*/)?[^./]+)\.[^/]*$")  # up to the first dot of the name: WebDataset's key
_NO_SAMPLE = re.compile(r"__[^/]*__(/|$)")
_DATASET = "__module__: megatron.energon\n__class__: CrudeWebdataset\n"


LARGEST_SAMPLE = 2**31  # bytes


class PlainMember(tarfile.TarInfo):
    """An entry of a tar. A sparse file is none: a few bytes may stand for terabytes of zeros."""

    def isreg(self) -> bool:
        return super().isreg() and not self.issparse()

    def isfile(self) -> bool:
        return self.isreg()


def part_of(member: tarfile.TarInfo) -> str | None:
    """Return the extension of a file of a sample, which is all that follows its name's first dot; None for others."""
    own = _KEY.match(member.name) if member.isreg() and not _NO_SAMPLE.match(member.name) else None
    return None if own is None else member.name[len(own[1]) + 1 :]


class Member(tarfile.ExFileObject):
    """A file of a tar, of which `read` returns the bytes; or, of a clip in a tar of this machine, where they lie."""

    def __init__(self, tar: tarfile.TarFile, member: tarfile.TarInfo, *, path: Path, start: int = 0) -> None:
        super().__init__(tar, member)
        self._place, self._stays = FileRange(path, start + member.offset_data, member.size), is_clip(member.name)

    def read(self, size: int | None = -1) -> Part:  # type: ignore[override]
        if self._place.start + self._place.length > self._place.path.stat().st_size:
            raise tarfile.ReadError("the tar ends inside of a file")  # which may claim to be larger than all memory
        return self._place if self._stays else super().read(size)


def is_prepared(folder: Path) -> bool:
    return any((folder / META / name).is_file() for name in _INFO)


def tars_below(folder: Path) -> list[str]:
    """Return the names of the tars in `folder` and its subfolders, relative to it, sorted."""
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.tar"))


def home_of(path: Path, *, cache: Path) -> Path:
    """Return the folder in which energon reads the tars of `path`, which is a folder or one tar.

    It is `path` itself if that is a prepared folder, else a folder in `cache`, which `prepare` fills with links.
    """
    return path if path.is_dir() and is_prepared(path) else cache / _short(path)


def prepare(path: Path, *, cache: Path, log: Callable[[str], None] = lambda _: None) -> None:
    """Index the tars of `path` unless they have an index: in the folder itself if it is writable, else in `cache`.

    Raises ValueError if there are no tars, or no samples in them.
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
    replace_file(meta / "split.yaml", json.dumps(split, indent=1))  # JSON is YAML
    replace_file(meta / "dataset.yaml", _DATASET)
    # Last: `is_prepared` looks for it.
    replace_file(meta / _INFO[0], json.dumps({"shard_counts": counts}, indent=1))


def sample_offsets(path: Path) -> list[int]:
    """Return the byte offsets at which a tar's samples begin, and at which the last one ends; [] if it has none.

    If the tar is truncated or damaged, one more sample covers everything that cannot be read.
    """
    starts: list[int] = []
    size = path.stat().st_size
    try:
        with tarfile.open(path, "r:", tarinfo=PlainMember) as tar:
            key = None
            while (member := tar.next()) is not None:
                tar.members = []  # type: ignore[attr-defined]  # otherwise it keeps them all
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
                starts.append(end)  # neither a header nor the end of a tar
    except tarfile.TarError:  # the last sample is truncated
        starts = starts or [0]
    return [*starts, size]


def _index_tar(path: Path) -> int:
    """Write the index of a tar, unless it exists and is newer than the tar. Returns the number of samples."""
    target = path.with_suffix(".tar.idx")
    with suppress(OSError):
        if target.stat().st_mtime_ns >= path.stat().st_mtime_ns and target.stat().st_size >= 16:
            return target.stat().st_size // 8 - 1
    offsets = sample_offsets(path)
    assert all(start <= end for start, end in pairwise(offsets))
    replace_file(target, struct.pack(f"<{len(offsets)}Q", *offsets))
    return max(len(offsets) - 1, 0)


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
