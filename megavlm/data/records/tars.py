"""Read the samples of WebDataset tars by number. Tars in a store are copied to this machine first.

An index file next to each tar holds the byte offsets of its samples, in megatron-energon's format. energon's own
preparation fails on a folder with one damaged tar. The indexer here indexes the readable part of a damaged tar and adds
one sample at its end for the rest. That sample cannot be read, so training counts and skips it.
"""

from __future__ import annotations

import hashlib
import os
import re
import tarfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import yaml  # type: ignore[import-untyped, unused-ignore]
from numpy.typing import NDArray

from megavlm.config.messages import shown
from megavlm.config.schema import DatasetConfig
from megavlm.data.records.containers import key_of_parts
from megavlm.data.records.shapes import UNASKED
from megavlm.data.records.tar_sample import Part, conversation_of_parts, is_clip
from megavlm.data.types import Conversation
from megavlm.errors import UserError
from megavlm.files import replace_file
from megavlm.inputs.bad_sample import BadSample, Reason
from megavlm.paths import FileRange
from megavlm.storage.cache import DATASETS, SPLIT, home, local_path, place_of_home
from megavlm.storage.hub import without_other_splits

_INDEX = ".idx"  # appended to the name of a tar, gives the name of its index
_READERS = 8  # tars that are indexed at once: most of the time is spent waiting for a disk or a network
_KEY = re.compile(r"((?:.*/)?[^./]+)\.[^/]*$")  # up to the first dot of the name: WebDataset's key
_NO_SAMPLE = re.compile(r"__[^/]*__(/|$)")


@dataclass(frozen=True, eq=False)
class Tar:
    """A tar file with the byte offsets at which its samples begin, followed by the end of the last sample."""

    name: str
    path: Path
    offsets: NDArray[np.uint64]


def open_tars(source: DatasetConfig, name: str, *, answers: bool = False) -> TarRecords:
    """Return the samples of a folder of tars, or of one tar; `name` is the data set's name in messages.

    `answers`: whether they are preferences.

    A tar without an index is indexed, for which every header is read once. The index is written next to the tar, or to
    the user's cache if the tar's folder is not writable. Raises UserError if there are no samples.
    """
    path = source.path
    if source.columns:
        raise UserError(f"--datasets {path} is tars, which columns= does not reach: rename the fields in their json")
    if path.endswith((".yaml", ".yml")):
        raise UserError(
            f"--datasets {path}: meta-datasets are not read: name each of its folders of tars, with weight="
        )
    try:
        tars = _tars_of(local_path(path, DATASETS))
    except (OSError, ValueError) as error:
        raise UserError(f"--datasets {path} {error}: name a folder of .tar files with samples") from error
    tars = [tar for tar in tars if len(tar.offsets) > 1]
    if not tars:
        raise UserError(f"--datasets {path} has tars without any sample: name a folder of .tar files with samples")
    return TarRecords(name, tars, answers=answers)


def _tars_of(path: Path) -> list[Tar]:
    """Return the training tars of a folder, or the one tar at `path`, with indices. Raises ValueError if none."""
    if path.is_file():
        names, folder = [path.name], path.parent
    elif path.is_dir():
        names, folder = _trained_on(path), path
    else:
        raise ValueError("is not a file or folder")
    paths = [folder / name for name in names]
    if unindexed := sum(not any(map(os.path.isfile, _indices(each))) for each in paths):
        print(f"indexing {unindexed} tars of {path}, once", flush=True)
    with ThreadPoolExecutor(_READERS) as pool:
        return list(map(Tar, names, paths, pool.map(indexed, paths)))


def _trained_on(folder: Path) -> list[str]:
    """Return the sorted names of a folder's tars for training: those that SPLIT lists or, without SPLIT, all but those
    of other splits beside training tars.

    Subfolders are included. Raises ValueError if there are no tars, or if SPLIT lists a tar that does not exist.
    """
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("[!.]*.tar")}  # macOS adds ._0.tar to 0.tar
    if not names:
        raise ValueError("has no tars")
    if not (folder / SPLIT).is_file():
        return without_other_splits(sorted(names))
    try:
        noted = yaml.load((folder / SPLIT).read_bytes(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        listed, left_out = list(noted["split_parts"]["train"]), list(noted.get("exclude") or ())
    except (yaml.YAMLError, AttributeError, LookupError, TypeError, RecursionError) as error:
        raise ValueError(f"has a {SPLIT} without a list of tars (split_parts, train)") from error
    if strange := [each for each in (*listed, *left_out) if not isinstance(each, str) or each not in names]:
        raise ValueError(f"has a {SPLIT} that names {shown(strange[0])}, which is none of its tars")
    return sorted(set(listed) - set(left_out))


def _indices(path: Path) -> tuple[Path, Path]:
    """Return the two paths of a tar's index: next to the tar, and in the cache for a folder that is not writable."""
    key = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:16]
    return path.with_name(path.name + _INDEX), place_of_home() / "tars" / f"{path.stem}-{key}{_INDEX}"


def indexed(path: Path) -> NDArray[np.uint64]:
    """Return the byte offsets of a tar's samples and the end of the last, from its index.

    The index is written if it is missing or older than the tar.
    """
    for index in _indices(path):
        with suppress(OSError):
            if index.stat().st_mtime_ns >= path.stat().st_mtime_ns:
                content = index.read_bytes()
                return np.frombuffer(content[: len(content) // 8 * 8], dtype="<u8")
    offsets = np.array(sample_offsets(path), dtype="<u8")
    beside, elsewhere = _indices(path)
    try:
        replace_file(beside, offsets.tobytes())
    except OSError:
        (home() / "tars").mkdir(exist_ok=True)
        replace_file(elsewhere, offsets.tobytes())
    return offsets


class TarRecords:
    """Implements `Records` on indexed tars: a record is a sample, the files that share a name."""

    unread: Sequence[str] = ()

    def __init__(self, name: str, tars: Sequence[Tar], *, answers: bool = False) -> None:
        self.name = name
        self.tars = tars
        self._kinds = ("preferences",) if answers else UNASKED
        self._ends = np.cumsum([len(tar.offsets) - 1 for tar in tars], dtype=np.int64)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def read(self, index: int) -> Conversation:
        return conversation_of_parts(self._parts(index), self._kinds)

    def key(self, index: int) -> bytes:
        return key_of_parts(self._parts(index))

    def label(self, index: int) -> str:
        tar, place = self._find(index)
        return f"{tar.name}/sample {place}"

    def _find(self, index: int) -> tuple[Tar, int]:
        number = int(np.searchsorted(self._ends, index, side="right"))
        return self.tars[number], index - (int(self._ends[number - 1]) if number else 0)

    def _parts(self, index: int) -> Mapping[str, Part]:
        """Return the files of a sample, keyed by extension. Raises BadSample if they cannot be read."""
        tar, place = self._find(index)
        start, end = (int(offset) for offset in tar.offsets[place : place + 2])
        try:
            with tar.path.open("rb") as file:
                file.seek(start)
                parts = _members(file, end, path=tar.path)
        except FileNotFoundError as error:
            raise BadSample(Reason.MISSING, str(error)) from error
        except (OSError, OverflowError, tarfile.TarError, ValueError, EOFError) as error:
            raise BadSample(Reason.TRUNCATED, f"{type(error).__name__}: {error}") from error
        if not parts:
            raise BadSample(Reason.TRUNCATED, f"byte {start} of the tar is no file of a sample")
        return parts


def _members(file: BinaryIO, end: int, *, path: Path) -> dict[str, Part]:
    """Return the files of a sample, keyed by extension, from the position of an open tar to offset `end`.

    A clip is returned as a byte range of the tar at `path`.
    """
    parts: dict[str, Part] = {}
    with tarfile.open(fileobj=file, mode="r:") as tar:
        while (member := tar.next()) is not None and member.offset < end:
            own = _KEY.match(member.name)
            if own and _is_of_sample(member) and (data := tar.extractfile(member)) is not None:
                name = member.name[len(own[1]) + 1 :]
                if is_clip(name):
                    parts[name] = FileRange(path, member.offset_data, member.size)
                else:
                    parts[name] = data.read()
    return parts


def sample_offsets(path: Path) -> list[int]:
    """Return the byte offsets at which a tar's samples begin, then the end of the last; [] for a tar without samples.

    If the tar is truncated or damaged, one more sample covers everything that cannot be read.
    """
    starts: list[int] = []
    size = path.stat().st_size
    try:
        with tarfile.open(path, "r:") as tar:
            key = None
            while (member := tar.next()) is not None:
                tar.members = []  # type: ignore[attr-defined]  # otherwise it keeps them all
                own = _KEY.match(member.name)
                if own and own[1] != key and _is_of_sample(member):
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


def _is_of_sample(member: tarfile.TarInfo) -> bool:
    return member.isreg() and not _NO_SAMPLE.match(member.name)
