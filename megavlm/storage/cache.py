"""Cache local copies of folders and files at URLs, each made once for all processes of this machine.

A copy is a folder whose name is a hash of the URL and of the versions of its files, so that a copy never changes.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import itertools
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from megavlm.errors import StoreLost, UserError
from megavlm.paths import Escapes, plain
from megavlm.storage import complaint, hub, is_url, without_secrets
from megavlm.storage.store import Moved, Store, StoreError
from megavlm.storage.transfer import move, with_retries

# Suffixes of the files that are copied: no code, and no second copy of the weights in another format.
SUFFIXES = (
    *(".json", ".txt", ".model", ".jinja", ".tiktoken", ".safetensors"),  # Hugging Face folders
    *(".jsonl", ".ndjson", ".csv", ".tsv", ".parquet", ".arrow", ".tar"),  # data sets
)
SPLIT = ".nv-meta/split.yaml"  # energon's file in a folder of tars that lists the tars of each split
DATASETS = "--datasets"  # the option whose repositories are data sets
# First bytes of a git-lfs pointer, the suffixes of files that are checked for it, and how many of a folder are.
_POINTER, _READ, _LOOKED_AT = b"version https://git-lfs", {".safetensors", ".json", ".model"}, 1000


def local_path(place: str, option: str, *, weights: bool = True) -> Path:
    """Return the local path of a place: a path unchanged, or the copy of a URL or of a Hugging Face hub repository.

    Of a folder at a URL, the files with a suffix in SUFFIXES are copied, and none of its subfolders except SPLIT. The
    weights of a model's repository are fetched only if `weights`. `option` names the flag in messages. Raises UserError
    if the place does not exist or cannot be used, StoreLost if the store does not answer.
    """
    if not is_url(place) or hub.repository(place, option, is_data=option == DATASETS):
        path = _from_hub(place, option, weights=weights) or Path(place)
        return path if option == DATASETS else _pulled(path, option)
    if problem := complaint(place):
        raise UserError(f"{option} {without_secrets(place)} {problem}")
    try:
        return _copied(place)
    except StoreError as error:
        raise (UserError if error.final else StoreLost)(f"{option}: {error}") from error
    except (UserError, Escapes) as error:
        raise UserError(f"{option} {place} {error}") from error


def is_here(place: str) -> bool:
    """Return whether a model is on this machine, as a folder or, with its weights, in the Hugging Face cache."""
    found = hub.repository(place, "")
    return hub.is_cached(found) if found is not None else not is_url(place) and Path(place).is_dir()


@functools.cache
def _from_hub(place: str, option: str, *, weights: bool) -> Path | None:
    """Return the local folder of the repository that `place` names, fetched if needed; None for another place."""
    found = hub.repository(place, option, is_data=option == DATASETS)
    if found is None or not found.is_data:
        return None if found is None else hub.model_folder(found, weights=weights)
    data: hub.Repository = found

    def link(folder: Path) -> None:
        """Fill the folder with symbolic links to the files of the training split, numbered in order."""
        temporary, files = folder.with_name(f"tmp-{folder.name}"), hub.data_files(data)
        for each in (folder, temporary):
            shutil.rmtree(each, ignore_errors=True)
        temporary.mkdir()
        for number, file in enumerate(files):
            (temporary / f"{number:05}-{file.name}").symlink_to(file.resolve())
        temporary.rename(folder)

    key = hashlib.sha256(json.dumps([data.name, data.part, data.revision]).encode()).hexdigest()[:16]
    try:
        folder = home() / key
    except UserError as error:
        raise data.problem(str(error)) from error
    return _kept(folder, link)


@functools.cache  # a rank asks for its model's folder ten times at its start
def _pulled(path: Path, option: str) -> Path:
    """Return a model's file or folder unchanged. Raises UserError if it has a git-lfs pointer in place of a file."""
    with contextlib.suppress(OSError):
        files = itertools.islice(path.iterdir(), _LOOKED_AT) if path.is_dir() else (path,)
        for file in (each for each in files if each.suffix in _READ):
            if file.is_file() and file.stat().st_size < 1024 and file.read_bytes().startswith(_POINTER):
                raise UserError(
                    f"{option} {path}: {file.name} is a pointer of git-lfs and not the file: run `git lfs pull` in "
                    f"{file.parent}"
                )
    return path


@functools.cache
def _copied(url: str) -> Path:
    store, files, is_folder = with_retries(functools.partial(_listed, url))
    if not files:
        raise UserError("is not there, or has no file that is used: look at its name")
    key = hashlib.sha256(json.dumps([url, sorted(files.items())]).encode()).hexdigest()[:16]
    sizes = {name: size for name, (size, _) in files.items()}
    folder = _kept(home() / key, lambda folder: _copy(folder, store, sizes))
    return folder if is_folder else folder / next(iter(files))


def _kept(folder: Path, make: Callable[[Path], None]) -> Path:
    """Return a folder of copies or links; one process makes it if it is missing or has a dangling link."""
    own = os.O_CLOEXEC | os.O_NOFOLLOW
    lock = os.open(folder.with_name(f"{folder.name}.lock"), os.O_RDWR | os.O_CREAT | own)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)  # waits for another process that makes it
        except OSError:  # as Lustre without the option flock: the processes of this machine meet elsewhere
            os.close(lock)
            elsewhere = Path(tempfile.gettempdir(), f"megavlm-{os.getuid()}-{folder.name}.lock")
            lock = os.open(elsewhere, os.O_RDWR | os.O_CREAT | own)
            fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.is_dir() or not all(file.exists() for file in folder.iterdir()):
            make(folder)
    finally:
        os.close(lock)
    return folder


def place_of_home() -> Path:
    """Return megavlm's cache folder, which may be missing: MEGAVLM_CACHE, or `megavlm` in the user's cache folder."""
    given = os.environ.get("MEGAVLM_CACHE")
    return Path(given) if given else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "megavlm")


def home() -> Path:
    """Return megavlm's cache folder, created if missing. Raises UserError if it cannot be written."""
    try:
        (place := place_of_home()).mkdir(parents=True, exist_ok=True)
        os.rmdir(tempfile.mkdtemp(dir=place))
    except OSError as error:
        raise UserError(
            f"needs the cache {place}, which cannot be written ({error.strerror}): set MEGAVLM_CACHE to another folder"
        ) from error
    return place


def _listed(url: str) -> tuple[Store, dict[str, tuple[int, str]], bool]:
    """Return the store, the (size, version) of each file to copy, and whether the URL is a folder."""
    store = Store.at(url)
    parent, _, name = url.rstrip("/").rpartition("/")
    if not (url.startswith("http") and url.endswith(SUFFIXES)):  # by http, listing a file would download it as a page
        found = {name: each for name, each in store.versions().items() if "/" not in name and name.endswith(SUFFIXES)}
        if any(each.endswith(".tar") for each in found):
            notes, _, split = SPLIT.partition("/")
            noted = store.below(notes).versions()
            more = {SPLIT: noted[split]} if split in noted else {}
        else:
            more = {}
        if found:
            used = {plain(name): each for name, each in found.items()} | more
            if url.startswith("http"):  # a page of links has neither sizes nor versions
                used = {name: store.version(name) for name in used}
            return store, used, True
    if not name.endswith(SUFFIXES):
        return store, {}, True
    store = Store.at(parent)
    return store, {plain(name): store.version(name)}, False


def _copy(folder: Path, store: Store, sizes: Mapping[str, int]) -> None:
    """Copy files into a folder that appears when all are copied. Raises UserError if the disk has too little space."""
    needed, temporary = sum(sizes.values()), folder.with_name(f"tmp-{folder.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    if needed > (free := shutil.disk_usage(home()).free):
        raise UserError(
            f"needs {needed / 1e9:.1f} GB in {home()}, where {free / 1e9:.1f} are free: delete copies there, or set "
            "MEGAVLM_CACHE to a folder on a larger disk"
        )
    print(f"copying {store.url} ({needed / 1e9:.3f} GB) to {folder}", flush=True)

    def fetch(name: str, moved: Moved) -> None:
        store.download(name, temporary / name, moved)
        if (found := (temporary / name).stat().st_size) != sizes[name] != 0:  # 0: a server by http did not say
            raise StoreError(f"{store.url}/{name} came with {found:,} bytes, not {sizes[name]:,}")

    try:
        move(sorted(sizes, key=lambda name: -sizes[name]), fetch)
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
