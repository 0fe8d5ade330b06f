"""Read WebDataset tars: index them for megatron-energon, then in order as a stream, or sample by sample by number.

The index beside each tar says where samples begin, and `.nv-meta` lists the tars. energon's own preparation fails on a
folder with one damaged tar. This one indexes what can be read of such a tar and adds one sample at its end for the
rest: that sample cannot be read, so training counts and skips it when it comes.
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
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from megavlm.config.schema import DatasetConfig
from megavlm.data.records.containers import key_of_parts
from megavlm.data.records.opening import name_of
from megavlm.data.records.tar_sample import Part, conversation_of_parts, is_clip
from megavlm.data.types import Conversation
from megavlm.errors import UserError
from megavlm.files import replace_file
from megavlm.inputs.bad_sample import BadSample, Reason
from megavlm.paths import FileRange
from megavlm.storage import is_url

if TYPE_CHECKING:
    from megavlm.data.records.energon import EnergonStream

META = ".nv-meta"
_INFO = (".info.json", ".info.yaml")
_READERS = 8  # tars that are indexed at once: waiting for a disk or a network takes most of the time
_KEY = re.compile(r"((?:.*/)?[^./]+)\.[^/]*$")  # up to the first dot of the name: WebDataset's key
_NO_SAMPLE = re.compile(r"__[^/]*__(/|$)")
_DATASET = "__module__: megatron.energon\n__class__: CrudeWebdataset\n"


def prepare_stream(source: DatasetConfig, *, run_dir: Path, log: Callable[[str], None] = lambda _: None) -> None:
    """Index the tars of a data set that have no index: in their folder, or in `run_dir` if that cannot be written to.

    One rank calls it, and the others wait for it before they call `open_stream`. It reads every header of every tar,
    once. Raises UserError if there are no tars with samples.
    """
    path = Path(source.path)
    if source.columns:
        raise UserError(
            f"--datasets {source.path} is tars, which columns= does not reach: rename the fields in their json"
        )
    if path.suffix in (".yaml", ".yml"):
        raise UserError(
            f"--datasets {source.path}: meta-datasets are not read: name each of its folders of tars, with weight="
        )
    if is_url(source.path):
        return
    if not path.exists():
        raise UserError(f"--datasets {source.path} is not a file or folder: check the path")
    try:
        prepare(path, cache=cache_of(run_dir), log=log)
    except (OSError, ValueError) as error:
        raise UserError(f"--datasets {source.path} {error}: name a folder of .tar files with samples") from error


def open_stream(
    source: DatasetConfig, *, run_dir: Path, rank: int, world: int, seed: int, shuffle: bool = True, held_out: float = 0
) -> EnergonStream:
    """Return the stream of the samples of a prepared data set that data-parallel rank `rank` of `world` reads.

    The fraction `held_out` of the samples comes as None.

    Raises UserError if it cannot be opened or megatron-energon is not installed.
    """
    try:
        from megavlm.data.records.energon import EnergonStream
    except ImportError as error:
        raise UserError(
            f"--datasets {source.path} is WebDataset, for which megatron-energon is missing ({error}): "
            "pip install 'megatron-energon>=7.4,<8'"
        ) from error
    home = _home_of(Path(source.path), cache=cache_of(run_dir))
    return EnergonStream(
        for_energon(source.path) if is_url(source.path) else str(home),
        source=source.path,
        name=name_of(source),
        rank=rank,
        world=world,
        seed=seed,
        shuffle=shuffle,
        held_out=held_out,
    )


def open_tars(source: DatasetConfig, *, cache: Path) -> TarRecords:
    """Return the samples of a folder of tars, or of one tar, that `prepare_stream` has indexed, by number.

    Raises UserError for data elsewhere.
    """
    if is_url(source.path):
        raise UserError(
            f"{source.path} has no samples that can be read by number, as validation samples are: name local tars or "
            "files with --validation PATH"
        )
    path = Path(source.path)
    home = _home_of(path, cache=cache)
    names = _tars_below(home) if path.is_dir() else [path.name]
    indexed = [home / name for name in names if (home / name).with_suffix(".tar.idx").is_file()]
    return TarRecords(name_of(source), indexed)


def cache_of(run_dir: Path) -> Path:
    """Return the folder for what cannot be written beside tars."""
    return run_dir / "webdataset"


def for_energon(place: str) -> str:
    """Return a URL as energon takes it: of S3 and GCS, as the profile that multi-storage-client makes of a bucket."""
    protocol, _, rest = place.partition("://")
    if protocol not in ("s3", "gs"):
        return place
    bucket, _, path = rest.partition("/")
    return f"msc://_{protocol}-{bucket}/{path}"


class TarRecords:
    """Implements `Records` on indexed tars: a record is a sample, which is the files that share a name."""

    unread: Sequence[str] = ()

    def __init__(self, name: str, paths: Sequence[Path]) -> None:
        self.name = name
        self._paths = paths

    def __len__(self) -> int:
        return int(self._ends[-1])

    def read(self, index: int) -> Conversation:
        return conversation_of_parts(self._parts(index))

    def key(self, index: int) -> bytes:
        return key_of_parts(self._parts(index))

    def label(self, index: int) -> str:
        tar, place = self._find(index)
        return f"{self._paths[tar].name}/sample {place}"

    @cached_property
    def _offsets(self) -> list[NDArray[np.uint64]]:
        """Return where the samples of each tar begin, and where its last one ends."""
        return [np.fromfile(path.with_suffix(".tar.idx"), dtype="<u8") for path in self._paths]

    @cached_property
    def _ends(self) -> NDArray[np.int64]:
        return np.cumsum([max(len(offsets) - 1, 0) for offsets in self._offsets], dtype=np.int64)

    def _find(self, index: int) -> tuple[int, int]:
        tar = int(np.searchsorted(self._ends, index, side="right"))
        return tar, index - (int(self._ends[tar - 1]) if tar else 0)

    def _parts(self, index: int) -> dict[str, Part]:
        """Return the files of a sample by extension. Raises BadSample if they cannot be read."""
        tar, place = self._find(index)
        path, parts = self._paths[tar], dict[str, Part]()
        start, end = (int(offset) for offset in self._offsets[tar][place : place + 2])
        try:
            with path.open("rb") as file:
                file.seek(start)
                with tarfile.open(fileobj=file, mode="r:") as opened:
                    opened.fileobject = partial(TarMember, path=path)  # type: ignore[assignment]
                    while (member := opened.next()) is not None and member.offset < end:
                        own = _KEY.match(member.name)
                        if own and _is_of_sample(member) and (data := opened.extractfile(member)) is not None:
                            parts[member.name[len(own[1]) + 1 :]] = data.read()
        except FileNotFoundError as error:
            raise BadSample(Reason.MISSING, str(error)) from error
        except (OSError, tarfile.TarError, ValueError, EOFError) as error:
            raise BadSample(Reason.TRUNCATED, f"{type(error).__name__}: {error}") from error
        if not parts:
            raise BadSample(Reason.TRUNCATED, f"byte {start} of the tar is no file of a sample")
        return parts


class TarMember(tarfile.ExFileObject):
    """A file of a tar, of which `read` returns the bytes; or, of a clip in a tar of this machine, where they lie."""

    def __init__(self, tar: tarfile.TarFile, member: tarfile.TarInfo, *, path: Path) -> None:
        super().__init__(tar, member)
        self._place, self._stays = FileRange(path, member.offset_data, member.size), is_clip(member.name)

    def read(self, size: int | None = -1) -> Part:  # type: ignore[override]
        return self._place if self._stays else super().read(size)


def prepare(path: Path, *, cache: Path, log: Callable[[str], None] = lambda _: None) -> None:
    """Index the tars of `path` unless they have an index: in the folder itself if it is writable, else in `cache`.

    Raises ValueError if there are no tars, or no samples in them.
    """
    if _is_prepared(_home_of(path, cache=cache)):
        return
    folder, names = (path, _tars_below(path)) if path.is_dir() else (path.parent, [path.name])
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
    # Last: `_is_prepared` looks for it.
    replace_file(meta / _INFO[0], json.dumps({"shard_counts": counts}, indent=1))


def sample_offsets(path: Path) -> list[int]:
    """Return the byte offsets at which a tar's samples begin, and at which the last one ends; [] if it has none.

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


def _index_tar(path: Path) -> int:
    """Write the index of a tar, unless it exists and is newer than the tar. Returns the number of samples."""
    target = path.with_suffix(".tar.idx")
    with suppress(OSError):
        if target.stat().st_mtime_ns >= path.stat().st_mtime_ns and target.stat().st_size >= 16:
            return target.stat().st_size // 8 - 1
    offsets = sample_offsets(path)
    replace_file(target, struct.pack(f"<{len(offsets)}Q", *offsets))
    return max(len(offsets) - 1, 0)


def _is_prepared(folder: Path) -> bool:
    return any((folder / META / name).is_file() for name in _INFO)


def _tars_below(folder: Path) -> list[str]:
    """Return the names of the tars in `folder` and its subfolders, relative to it, sorted."""
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.tar"))


def _home_of(path: Path, *, cache: Path) -> Path:
    """Return the folder in which energon reads the tars of `path`, which is a folder or one tar.

    It is `path` itself if that is a prepared folder, else a folder in `cache`, which `prepare` fills with links.
    """
    return path if path.is_dir() and _is_prepared(path) else cache / _short(path)


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
