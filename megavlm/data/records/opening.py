"""Open an entry of `--datasets` as records: find its files, their format, the kind of record and the image folder."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import cast

from megavlm.config.messages import shown
from megavlm.config.schema import DatasetConfig
from megavlm.data.records import arrow
from megavlm.data.records.arrays import NotAnArray, array_spans
from megavlm.data.records.arrow import ArrowFile
from megavlm.data.records.container import Container, FileRecords, Joined, Records
from megavlm.data.records.pairs import record_of
from megavlm.data.records.parquet import ParquetFile
from megavlm.data.records.pictures import FindFile, file_below, stored_below
from megavlm.data.records.spans import BOM, SpanFile, line_spans
from megavlm.data.records.turns import FIELD, Shape, shape_of
from megavlm.data.records.videos import FindVideo, stored_video, video_below
from megavlm.data.types import BadSample
from megavlm.errors import UserError
from megavlm.paths import open_regular
from megavlm.storage.cache import local_path
from megavlm.storage.urls import complaint, is_url, without_secrets

_TABLES: dict[str, Callable[[Path], Container]] = {".parquet": ParquetFile, ".arrow": ArrowFile}
_FILES = (".json", ".jsonl", ".ndjson", ".txt", *_TABLES)  # suffixes of the files that are read in a folder
_UNREAD_PAIRS = "pairs, which are no conversations: add --objective contrastive, or name another data set"
_NO_PAIRS = (
    'conversations, but --objective compares pairs: write {"query": …, "positives": […]} (docs/embeddings.md), or use '
    "--objective next-token"
)
_LOOKED_AT = 100  # most records that are read to find a good one
_NAMED = 12  # most of their fields that a message names
_UNREADABLE = {
    b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
    b"\x1f\x8b": "gzip",
    b"PK\x03\x04": "zip",
    b"\x28\xb5\x2f\xfd": "zstd",
}


def name_of(source: DatasetConfig) -> str:
    """Return the name of a data set in metrics and messages."""
    return source.name or Path(source.path).stem


def is_stream(source: DatasetConfig) -> bool:
    """Return whether a data set is WebDataset tars, which are read in order, not by number (`Records`)."""
    if source.kind != "auto":
        return source.kind == "webdataset"
    path = Path(source.path)
    if path.suffix in (".tar", ".yaml", ".yml") or (is_url(source.path) and path.suffix.lower() not in _FILES):
        return True
    return path.is_dir() and any(any(path.glob(pattern)) for pattern in (".nv-meta", "*.tar"))


def open_records(source: DatasetConfig, *, pairs: bool | None = None) -> Records:
    """Return the records of a data set that is not a stream, in file order (the files of a folder are sorted by name).

    `pairs`: whether they have to be of pairs; None: they may. Raises UserError if the data set as a whole cannot be
    used. For a single bad record, `read` raises BadSample.
    """
    assert not is_stream(source)
    path = _local(source)
    containers = [_open_file(source, file) for file in files_of(source)]
    container = containers[0] if len(containers) == 1 else Joined(containers)
    if not len(container):
        raise _wrong(source, "has no records: name a file that has some")
    find, find_video = _finders(source, path)
    shape = _shape(source, container)
    if pairs is not None and (shape == "pairs") != pairs:
        raise _wrong(source, f"has records of {_UNREAD_PAIRS if shape == 'pairs' else _NO_PAIRS}")
    convert = partial(record_of, shape=shape, find=find, find_video=find_video)
    return FileRecords(name_of(source), container, convert)


def _local(source: DatasetConfig) -> Path:
    """Return the file or folder of a data set; of a URL, its copy on this machine."""
    return local_path(source.path, "--datasets")


def _finders(source: DatasetConfig, path: Path) -> tuple[FindFile, FindVideo]:
    """Return the functions that find the images and the videos that records name: on a disk, or in a store."""
    root = source.image_root
    if root is None:
        place = source.path.rstrip("/")
        root = place if path.is_dir() else place.rpartition("/")[0] if is_url(place) else str(path.parent)
    if is_url(root):
        if problem := complaint(root):
            raise _wrong(source, f"has image_root={without_secrets(root)}, which {problem}")
        stored = partial(stored_below, root.rstrip("/"))
        return stored, partial(stored_video, stored)
    if not Path(root).is_dir():
        raise _wrong(source, f"has image_root={source.image_root}, which is not a folder: name the one with the images")
    return partial(file_below, Path(root)), partial(video_below, Path(root))


def files_of(source: DatasetConfig) -> list[Path]:
    """Return the files of a data set that is not a stream, in order. Raises UserError if there are none."""
    path = _local(source)
    if path.is_file():
        return [path]
    if path.is_dir() and arrow.is_saved(path):
        return _saved_files(source, path)
    if not path.is_dir():
        raise _wrong(source, "is not a file or folder: check the path")
    found = sorted((file for file in path.iterdir() if file.suffix.lower() in _FILES), key=lambda file: file.name)
    suffixes = sorted({file.suffix.lower() for file in found})
    if len(suffixes) != 1:
        what = f"has files of several kinds ({', '.join(suffixes)})" if found else f"has no {', '.join(_FILES)} or .tar"
        raise _wrong(source, f"{what}: name the file, or a folder of files of one kind")
    return found


def _saved_files(source: DatasetConfig, path: Path) -> list[Path]:
    try:
        files = arrow.saved_files(path)
    except UserError as error:
        raise UserError(f"--datasets {error}") from error
    if not files:
        raise _wrong(source, "has no files: save the data set again")
    return files


def _open_file(source: DatasetConfig, file: Path) -> Container:
    try:
        with open_regular(file) as opened:
            head = opened.read(4096)
    except OSError as error:
        what = error.strerror or "it is no regular file"
        raise _wrong(source, f"cannot be read ({what}): check what it is, and its permissions", file) from error
    suffix = file.suffix.lower()
    if suffix in _TABLES:
        try:
            return _TABLES[suffix](file)
        except UserError:
            raise
        except (OSError, ValueError) as error:
            kind = suffix.removeprefix(".")
            raise _wrong(source, f"is no {kind} file ({shown(str(error))}): write it again", file) from error
    for start, form in _UNREADABLE.items():
        if head.startswith(start):
            raise _wrong(source, f"is {form}: convert it to plain UTF-8", file)
    if not head:
        raise _wrong(source, "is empty: name a file with records", file)
    if suffix == ".txt" and source.kind in ("auto", "text"):
        return SpanFile(file, line_spans(file), content="text")
    if head.removeprefix(BOM).lstrip()[:1] != b"[":
        return SpanFile(file, line_spans(file), content="lines")
    try:
        return SpanFile(file, array_spans(file), content="array")
    except NotAnArray as error:
        line = "write one record per line (JSON Lines), of which only the bad lines are skipped"
        raise _wrong(source, f"is no JSON array ({error}): repair it, or {line}", file) from error


def _shape(source: DatasetConfig, container: Container) -> Shape:
    """Return the kind of the records: the given one or, for `auto`, that of the first record that has a known field.

    Raises UserError if none of the first records has the field of the kind.
    """
    fields: list[str] = []
    for index in range(min(len(container), _LOOKED_AT)):
        try:
            record = container.read(index)
        except BadSample:
            continue
        shape = shape_of(record) if source.kind == "auto" else cast(Shape, source.kind)
        if shape is not None and isinstance(record, dict) and record.get(FIELD[shape]) is not None:
            return shape
        fields = fields or (sorted(map(str, record)) if isinstance(record, dict) else [])
    if not fields:
        raise _wrong(source, f"has no record among its first {_LOOKED_AT}: write JSON Lines or an array of objects")
    wanted = ", ".join(FIELD.values()) if source.kind == "auto" else FIELD[cast(Shape, source.kind)]
    more = f" and {len(fields) - _NAMED} more" if len(fields) > _NAMED else ""
    raise _wrong(
        source,
        f"has records of the fields {', '.join(map(shown, fields[:_NAMED]))}{more}, none of {wanted}: see docs/data.md "
        "for kinds",
    )


def _wrong(source: DatasetConfig, what: str, file: Path | None = None) -> UserError:
    inside = "" if file is None or file == Path(source.path) else f": {file.name}"
    return UserError(f"--datasets {source.path}{inside} {what}")
