"""Open an entry of `--datasets` as records: find its files, their format, the kind of record and the image folder."""

from __future__ import annotations

import glob
from collections.abc import Callable
from functools import partial
from pathlib import Path

from megavlm.config.messages import shown
from megavlm.config.schema import DatasetConfig
from megavlm.data.records import arrow
from megavlm.data.records.arrays import NotAnArray, array_spans
from megavlm.data.records.arrow import ArrowFile
from megavlm.data.records.container import Choose, Container, FileRecords, Joined, Records, Renamed
from megavlm.data.records.csv_rows import DELIMITERS, CsvFile
from megavlm.data.records.detect import check_columns, columns_read, kind_of, wrong
from megavlm.data.records.parquet import ParquetFile
from megavlm.data.records.pictures import FindFile, file_below, stored_below
from megavlm.data.records.shapes import record_of
from megavlm.data.records.spans import BOM, SpanFile, line_spans
from megavlm.data.records.videos import FindVideo, stored_video, video_below
from megavlm.errors import UserError
from megavlm.paths import open_regular
from megavlm.storage import complaint, is_url, without_secrets
from megavlm.storage.cache import local_path

_TABLES: dict[str, Callable[[Path, Choose], Container]] = {".parquet": ParquetFile, ".arrow": ArrowFile}
_FILES = (".json", ".jsonl", ".ndjson", ".txt", *DELIMITERS, *_TABLES)  # suffixes of the files of a folder
_UNREAD_PAIRS = "pairs, which are no conversations: add --objective contrastive, or name another data set"
_NO_PAIRS = (
    'conversations, but --objective compares pairs: write {"query": …, "positives": […]} (docs/models.md), or use '
    "--objective next-token"
)
_OF_TABLES = {b"PAR1": ".parquet", b"ARROW1": ".arrow"}
_TO_UTF8 = "convert it, as iconv -f {} -t UTF-8 FILE > NEW does"
# How files begin that are no text, and what helps.
_UNREADABLE = {
    b"\xff\xfe\0\0": ("is UTF-32", _TO_UTF8.format("UTF-32")),
    b"\xff\xfe": ("is UTF-16", _TO_UTF8.format("UTF-16")),
    b"\xfe\xff": ("is UTF-16", _TO_UTF8.format("UTF-16")),
    b"{\0": ("is UTF-16", _TO_UTF8.format("UTF-16LE")),
    b"[\0": ("is UTF-16", _TO_UTF8.format("UTF-16LE")),
    b"\0{": ("is UTF-16", _TO_UTF8.format("UTF-16BE")),
    b"\0[": ("is UTF-16", _TO_UTF8.format("UTF-16BE")),
    b"\x1f\x8b": ("is gzip", "unpack it with gunzip"),
    b"PK\x03\x04": ("is zip, as .xlsx is", "unpack it, or save the table as CSV"),
    b"\x28\xb5\x2f\xfd": ("is zstd", "unpack it with unzstd"),
    **{start: (f"is {suffix[1:]}", f"name it FILE{suffix}") for start, suffix in _OF_TABLES.items()},
    b"version https://git-lfs": ("is a pointer of git-lfs, not the file", "run git lfs pull in its repository"),
    b"<!DOCTYPE": ("is a web page", "download the file itself"),
    **{b"\x80" + bytes([version]): ("is a pickle", "write its records as JSON Lines") for version in range(2, 6)},
    b"\x93NUMPY": ("is an array of NumPy", "write records that name it, as JSON Lines"),
    b"<html": ("is a web page", "download the file itself"),
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
    check_columns(source)
    container = _container(source, partial(columns_read, source))
    find, find_video = _finders(source)
    kind, unread = kind_of(source, container, files_of(source)[0])
    if pairs is not None and (kind == "pairs") != pairs:
        raise wrong(source, f"has records of {_UNREAD_PAIRS if kind == 'pairs' else _NO_PAIRS}")
    convert = partial(record_of, kind=kind, find=find, find_video=find_video)
    container = Renamed(container, source.columns) if source.columns else container
    return FileRecords(name_of(source), container, convert, unread=unread)


def open_rows(source: DatasetConfig, option: str) -> tuple[Container, FindFile, FindVideo]:
    """Return the raw records of files that are no training data, with all their fields, and what finds the images and
    the videos that they name. `option` named them. Raises UserError.
    """
    try:
        if is_stream(source):
            raise wrong(source, "has tars, which training alone reads: give a file of records")
        container = _container(source, list)
        return (Renamed(container, source.columns) if source.columns else container), *_finders(source)
    except UserError as error:
        raise UserError(str(error).replace("--datasets", option, 1)) from error


def _container(source: DatasetConfig, choose: Choose) -> Container:
    containers = [_open_file(source, file, choose) for file in files_of(source)]
    container = containers[0] if len(containers) == 1 else Joined(containers)
    if not len(container):
        raise wrong(source, "has no records: name a file that has some")
    return container


def _local(source: DatasetConfig) -> Path:
    """Return the file or folder of a data set; of a URL, its copy on this machine."""
    return local_path(source.path, "--datasets")


def _finders(source: DatasetConfig) -> tuple[FindFile, FindVideo]:
    """Return the functions that find the images and the videos that records name: on a disk, or in a store."""
    root, path = source.image_root, _local(source)
    if root is None:
        place = source.path.rstrip("/")
        if is_url(place):
            root = place if path.is_dir() else place.rpartition("/")[0]
        else:
            root = str(path if path.is_dir() else path.parent)
    if is_url(root):
        if problem := complaint(root):
            raise wrong(source, f"has image_root={without_secrets(root)}, which {problem}")
        stored = partial(stored_below, root.rstrip("/"))
        return stored, partial(stored_video, stored)
    if not Path(root).is_dir():
        raise wrong(source, f"has image_root={source.image_root}, which is not a folder: name the one with the images")
    return partial(file_below, Path(root)), partial(video_below, Path(root))


def files_of(source: DatasetConfig) -> list[Path]:
    """Return the files of a data set that is not a stream, in order. Raises UserError if there are none."""
    path = _local(source)
    if path.is_file():
        return [path]
    if path.is_dir() and arrow.is_saved(path):
        return _saved_files(source, path)
    if not path.is_dir():
        here = Path(source.path.rpartition("#")[0])
        part = here.is_file() and f"is not there, but {here} is: no option takes a part, so give a smaller file"
        if glob.has_magic(source.path) and glob.glob(source.path):
            part = "is a pattern, which only a shell expands: leave out the quotes, or name the folder"
        raise wrong(source, part or "is not a file or folder: check the path")
    found = sorted((file for file in path.iterdir() if file.suffix.lower() in _FILES), key=lambda file: file.name)
    suffixes = sorted({file.suffix.lower() for file in found})
    if len(suffixes) != 1:
        what = f"has files of several kinds ({', '.join(suffixes)})" if found else f"has no {', '.join(_FILES)} or .tar"
        raise wrong(source, f"{what}: name the file, or a folder of files of one kind")
    return found


def _saved_files(source: DatasetConfig, path: Path) -> list[Path]:
    try:
        files = arrow.saved_files(path)
    except UserError as error:
        raise UserError(f"--datasets {error}") from error
    if not files:
        raise wrong(source, "has no files: save the data set again")
    return files


def _open_file(source: DatasetConfig, file: Path, choose: Choose) -> Container:
    try:
        with open_regular(file) as opened:
            head = opened.read(4096)
    except OSError as error:
        what = error.strerror or "it is no regular file"
        raise wrong(source, f"cannot be read ({what}): check what it is, and its permissions", file) from error
    suffix = file.suffix.lower()
    if not head:
        raise wrong(source, "is empty: name a file with records", file)
    for start, (form, remedy) in _UNREADABLE.items():
        if head.startswith(start) and not (suffix in _TABLES and start in _OF_TABLES):
            raise wrong(source, f"{form}: {remedy}", file)
    if suffix in _TABLES or suffix in DELIMITERS:
        try:
            return CsvFile(file) if suffix in DELIMITERS else _TABLES[suffix](file, choose)
        except UserError:
            raise
        except (OSError, ValueError) as error:
            kind = suffix.removeprefix(".")
            raise wrong(source, f"is no {kind} file ({shown(str(error))}): write it again", file) from error
    if suffix == ".txt" and source.kind in ("auto", "text"):
        return SpanFile(file, line_spans(file), content="text")
    if head.removeprefix(BOM).lstrip()[:1] != b"[":
        return SpanFile(file, line_spans(file), content="lines")
    try:
        return SpanFile(file, array_spans(file), content="array")
    except NotAnArray as error:
        line = "write one record per line (JSON Lines), of which only the bad lines are skipped"
        raise wrong(source, f"is no JSON array ({error}): repair it, or {line}", file) from error
