"""Open an entry of `--datasets` as records: find its files, their format, the kind of record and the image folder."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from megavlm.config.messages import did_you_mean, plain, shown
from megavlm.config.schema import DatasetConfig
from megavlm.data.records.containers import Choose, Container, FileRecords, Joined, Records, renamed
from megavlm.data.records.media import FindFile, FindVideo, file_below, stored_below, stored_video, video_below
from megavlm.data.records.shapes import REJECTED, SHAPES, UNASKED, columns_of, record_of, shape_of
from megavlm.data.records.tables import TableFile, is_saved, saved_files
from megavlm.data.records.tars import open_tars
from megavlm.data.records.text_files import BOM, DELIMITERS, CsvFile, NotAnArray, SpanFile, array_spans, line_spans
from megavlm.data.records.turns import VISUALS
from megavlm.errors import UserError
from megavlm.inputs.bad_sample import BadSample
from megavlm.paths import open_regular
from megavlm.storage import complaint, is_url, without_secrets
from megavlm.storage.cache import local_path
from megavlm.storage.hub import without_other_splits

_TABLES = (".parquet", ".arrow")
_FILES = (".json", ".jsonl", ".ndjson", ".txt", *DELIMITERS, *_TABLES)  # suffixes of the files of a folder
_UNREAD_PAIRS = "pairs, which are no conversations: add --objective contrastive, or name another data set"
_NO_PAIRS = (
    'conversations, but --objective compares pairs: write {"query": …, "positives": […]} (docs/models.md), or use '
    "--objective next-token"
)
# First bytes of files that hold no records before they are converted.
_UNREAD = {
    b"\x1f\x8b": "is compressed: unpack it with gunzip",
    b"\x28\xb5\x2f\xfd": "is compressed: unpack it with unzstd",
    b"PK\3\4": "is a zip archive: unpack it",
    b"\xff\xfe": "is UTF-16: convert it, as iconv -f UTF-16 -t UTF-8 does",
}
_META = re.compile(rb'\s*\{\s*"[^"]*"\s*:\s*\{\s*"root"\s*:[^{}]*"annotation"\s*:')  # InternVL's list of data sets
_LOOKED_AT = 100  # most records that are read to detect the kind
_NAMED = 30  # most fields that a message names
_PICTURE = re.compile("image|img|pic|photo|video|figure|frame|jpe?g|png", re.IGNORECASE)
_PICTURE_FILES = (".jpg", ".jpeg", ".png", ".webp")  # suffixes of texts that name a picture


def name_of(source: DatasetConfig) -> str:
    """Return the name of a data set in metrics and messages."""
    return source.name or Path(source.path).stem


def is_tars(source: DatasetConfig) -> bool:
    """Return whether a data set consists of WebDataset tars."""
    if source.kind != "auto":
        return source.kind == "webdataset"
    path = Path(source.path)
    if path.suffix in (".tar", ".yaml", ".yml") or (is_url(source.path) and path.suffix.lower() not in _FILES):
        return True
    return path.is_dir() and any(any(path.glob(pattern)) for pattern in (".nv-meta", "*.tar"))


def open_records(source: DatasetConfig, *, pairs: bool | None = None, answers: bool = False) -> Records:
    """Return the records of a data set, in file order (the files of a folder are sorted by name).

    `pairs`: whether the records must be contrastive pairs (True) or must not be (False); None accepts any kind.
    `answers`: whether they must be preferences. Raises UserError if the data set as a whole cannot be used. For a
    single bad record, `read` raises BadSample.
    """
    if is_tars(source):
        return open_tars(source, name_of(source), answers=answers)
    if answers and source.kind == "auto":  # ms-swift's are also conversations
        source = replace(source, kind="preferences")
    _check_columns(source)
    container = _container(source, files_of(source), partial(_columns_read, source))
    find, find_video = _finders(source)
    kind, unread = _kind_of(source, container)
    if pairs is not None and (kind == "pairs") != pairs:
        raise _wrong(source, f"has records of {_UNREAD_PAIRS if kind == 'pairs' else _NO_PAIRS}")
    if pairs is not None and (kind == "preferences") != answers:
        what = (
            "preferences: add --objective dpo" if kind == "preferences" else f"{kind}, but --objective compares answers"
        )
        raise _wrong(source, f"has records of {what}, or name another data set")
    convert = partial(record_of, kind=kind, find=find, find_video=find_video)
    return FileRecords(name_of(source), Joined([container], source.columns), convert, unread=unread)


class RawRecords(NamedTuple):
    """Unconverted records with all their fields, and the functions that look up images and videos by name."""

    records: Container
    find: FindFile
    find_video: FindVideo


def open_rows(source: DatasetConfig, option: str) -> RawRecords:
    """Return the raw records of files that are not training data; `option` is their flag in messages.

    Raises UserError.
    """
    try:
        if is_tars(source):
            raise _wrong(source, "has tars, which only --datasets and --validation read: give a file of records")
        container = _container(source, files_of(source, every=True), list)
        return RawRecords(Joined([container], source.columns), *_finders(source))
    except UserError as error:
        raise UserError(str(error).replace("--datasets", option, 1)) from error


def _container(source: DatasetConfig, files: Sequence[Path], choose: Choose) -> Container:
    container = Joined([_open_file(source, file, choose) for file in files])
    if not len(container):
        raise _wrong(source, "has no records: name a file that has some")
    return container


def _local(source: DatasetConfig) -> Path:
    """Return the local file or folder of a data set; for a URL, the copy on this machine."""
    return local_path(source.path, "--datasets")


def _finders(source: DatasetConfig) -> tuple[FindFile, FindVideo]:
    """Return the functions that look up images and videos by the names in records, on a disk or in a store."""
    root, path = source.image_root, _local(source)
    if root is None:
        place = source.path.rstrip("/")
        if is_url(place):
            root = place if path.is_dir() else place.rpartition("/")[0]
        else:
            root = str(path if path.is_dir() else path.parent)
    if is_url(root):
        if problem := complaint(root):
            raise _wrong(source, f"has image_root={without_secrets(root)}, which {problem}")
        stored = partial(stored_below, root.rstrip("/"))
        return stored, partial(stored_video, stored)
    folder = Path(os.path.expanduser(root))  # behind a comma, no shell does
    if not folder.is_dir():
        raise _wrong(source, f"has image_root={source.image_root}, which is not a folder: name the one with the images")
    return partial(file_below, folder), partial(video_below, folder)


def files_of(source: DatasetConfig, *, every: bool = False) -> list[Path]:
    """Return the files of a data set that is not tars, in order; of a folder those of the training split, or `every`
    one. Raises UserError if there are none.
    """
    path = _local(source)
    if path.is_file():
        return [path]
    if path.is_dir() and is_saved(path):
        try:
            found = saved_files(path)
        except UserError as error:
            raise UserError(f"--datasets {error}") from error
        if not found:
            raise _wrong(source, "has no files: save the data set again")
        return found
    if not path.is_dir():
        raise _wrong(source, "is not a file or folder: check the path")
    names = sorted(file.name for file in path.iterdir() if file.suffix.lower() in _FILES and file.name[0] != ".")
    found = [path / name for name in (names if every else without_other_splits(names))]
    suffixes = sorted({file.suffix.lower() for file in found})
    if len(suffixes) != 1:
        what = f"has files of several kinds ({', '.join(suffixes)})" if found else f"has no {', '.join(_FILES)} or .tar"
        raise _wrong(source, f"{what}: name the file, or a folder of files of one kind")
    return found


def _open_file(source: DatasetConfig, file: Path, choose: Choose) -> Container:
    try:
        with open_regular(file) as opened:
            head = opened.read(4096)
    except OSError as error:
        what = error.strerror or "it is no regular file"
        raise _wrong(source, f"cannot be read ({what}): check what it is, and its permissions", file) from error
    suffix = file.suffix.lower()
    if not head:
        raise _wrong(source, "is empty: name a file with records", file)
    for start, what in _UNREAD.items():
        if head.startswith(start):
            raise _wrong(source, what, file)
    if _META.match(head):
        raise _wrong(source, "lists data sets: name each, as ANNOTATION,image_root=ROOT,weight=LENGTH", file)
    if suffix in _TABLES or suffix in DELIMITERS:
        try:
            return CsvFile(file) if suffix in DELIMITERS else TableFile(file, choose)
        except UserError:
            raise
        except (OSError, ValueError) as error:
            kind = suffix.removeprefix(".")
            raise _wrong(source, f"is no {kind} file ({shown(str(error))}): write it again", file) from error
    if suffix == ".txt" and source.kind in ("auto", "text"):
        return SpanFile(file, line_spans(file), content="text")
    if head.removeprefix(BOM).lstrip()[:1] != b"[":
        return SpanFile(file, line_spans(file), content="lines")
    try:
        return SpanFile(file, array_spans(file), content="array")
    except NotAnArray as error:
        line = "write one record per line (JSON Lines), of which only the bad lines are skipped"
        raise _wrong(source, f"is no JSON array ({error}): repair it, or {line}", file) from error


def _kinds(source: DatasetConfig) -> list[str]:
    """Return the candidate kinds of the records, in the order in which they are tried: first the kinds that need a
    field which `columns` maps.
    """
    if source.kind != "auto":
        return [source.kind]
    mapped = source.columns or {}
    return sorted(UNASKED, key=lambda kind: not any(name in mapped for group in SHAPES[kind].needs for name in group))


def _check_columns(source: DatasetConfig) -> None:
    """Raise UserError if `columns` maps a field that no kind of record has."""
    known = dict.fromkeys(name for shape in SHAPES.values() for name in (*shape.fields, *VISUALS))
    for name, column in (source.columns or {}).items():
        if name not in known:
            turned = f": turn it round, {column}:{name}" if column in known else did_you_mean(name, known)
            hint = turned or f": use one of {', '.join(known)}"
            raise _wrong(source, f"has columns={plain(name)}:{plain(column)}, but {plain(name)} is not read{hint}")


def _columns_read(source: DatasetConfig, names: Sequence[str]) -> list[str]:
    """Return the columns of a table that are read, by their names in the file."""
    columns = {name: column for name, column in (source.columns or {}).items() if column in names}
    kept = [name for name in names if name not in columns.values()]
    wanted = set(columns_of(_kinds(source), [*kept, *columns]))
    read = wanted.intersection(kept) | {columns[name] for name in wanted.intersection(columns)}
    return [name for name in names if name in read]


@dataclass
class _Look:
    """Fields and kind of the first records of a data set."""

    has: dict[str, Any]  # each field with its first value that is not null
    kind: str | None = None
    records: int = 0  # number of records that are objects
    bad: list[str] = field(default_factory=list)  # descriptions of the records that are not


def _kind_of(source: DatasetConfig, container: Container) -> tuple[str, list[str]]:
    """Return the kind of the first record that has all fields of a kind, and the unread fields that look like pictures.

    The second is empty if images or videos are read. Raises UserError if none of the first records has all fields of a
    kind, or if none has a column that `columns` names.
    """
    look, columns = _look(source, container), source.columns or {}
    if not look.has or (look.bad and not look.records):
        what = f"has no record among its first {len(look.bad)} ({''.join(look.bad[:1])})"
        raise _wrong(source, f"{what}: write JSON Lines or an array of objects, in UTF-8")
    valued = [*columns, *(name for name, value in look.has.items() if value is not None)]
    near = SHAPES[max(_kinds(source), key=lambda kind: (SHAPES[kind].share(valued), kind == "vqa", kind != "pairs"))]
    lacks = [group[0] for group in near.missing(valued)]
    unknown = [name for name in columns.values() if name not in look.has]
    if look.kind is not None and not unknown:
        return look.kind, _unread_pictures(look, columns)
    fields = [shown(name) + ("" if value is not None else " (null)") for name, value in look.has.items()]
    more = f" and {len(fields) - _NAMED} more" if len(fields) > _NAMED else ""
    what = f"has records of the fields {', '.join(fields[:_NAMED])}{more}"
    if unknown:
        hint = did_you_mean(unknown[0], look.has)
        raise _wrong(source, f"{what}, and no {shown(unknown[0])}, which columns= names{hint}")
    needs = "; ".join(SHAPES[kind].words for kind in _kinds(source))
    if not lacks:
        raise _wrong(
            source, f"{what}, but none of the first {look.records} has all of {near.words}: check what is null"
        )
    pictures = [] if any(name in valued for name in VISUALS) else ["image"]
    mapping = "+".join(f"{name}:NAME" for name in [*lacks, *pictures])
    meant = f"say which they are, as {source.path},columns={mapping} (docs/data.md)"
    if source.kind == "auto" and any(name in valued for name in REJECTED):
        meant = f"for pairs of answers use --objective dpo, else {meant}"
    raise _wrong(source, f"{what}, none of {needs}: {meant}")


def _look(source: DatasetConfig, container: Container) -> _Look:
    """Read the first records until one has all fields of a kind and all columns of `columns` have been seen."""
    kinds, columns = _kinds(source), source.columns or {}
    names = container.names or ()
    read = _columns_read(source, names)
    look = _Look({name: None if name in read else True for name in names})
    if names and not read:
        return look
    for index in range(min(len(container), _LOOKED_AT)):
        try:
            record = container.read(index)
        except BadSample as error:
            look.bad.append(f"{container.label(index)}: {error.detail}")
            continue
        if not isinstance(record, Mapping):
            look.bad.append(f"{container.label(index)} is {shown(record)}")
            continue
        look.records += 1
        look.has |= {str(name): value for name, value in record.items() if look.has.get(str(name)) is None}
        look.kind = look.kind or shape_of(renamed(record, columns), kinds)
        if look.kind is not None and all(name in look.has for name in columns.values()):
            break
    return look


def _unread_pictures(look: _Look, columns: Mapping[str, str]) -> list[str]:
    """Return the unread fields that look like pictures; none if the records have images or videos that are read."""
    assert look.kind is not None
    had = {name for name, value in look.has.items() if value is not None}
    if had.intersection(VISUALS) or set(VISUALS).intersection(columns):
        return []
    read = {*SHAPES[look.kind].fields, *columns.values()}
    return sorted(
        name for name in had - read if _PICTURE.search(name) or str(look.has[name]).lower().endswith(_PICTURE_FILES)
    )


def _wrong(source: DatasetConfig, what: str, file: Path | None = None) -> UserError:
    """Return the error for a data set or, with `file`, for a file in its folder; `what` is the rest of the message."""
    inside = "" if file is None or file == Path(source.path) else f": {file.name}"
    return UserError(f"--datasets {source.path}{inside} {what}")
