"""Access a folder in an object store through fsspec: list, read, write, upload, download and delete its files.

fsspec and the library of a protocol (s3fs, gcsfs) are imported when a store is opened.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from email.utils import parsedate_to_datetime
from functools import partial
from pathlib import Path
from typing import Any

from megavlm.errors import UserError
from megavlm.files import open_new
from megavlm.paths import open_regular
from megavlm.storage import complaint, without_secrets

Moved = Callable[[int], None]  # progress callback, called with the number of further bytes transferred

_PIECE = 2**22  # bytes that are copied at once if fsspec does not copy whole files
_PACKAGES = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs"}  # protocol → package that reads it
_HTTP_LIMITS = {"total": 300, "sock_connect": 20, "sock_read": 60}  # seconds; `total` limits a response, but for files


async def _http_client(**options: Any) -> Any:
    """Return the client session of a store at http(s), with timeouts and without redirects to other hosts."""
    import aiohttp
    import yarl

    async def refuse_others(session: Any, context: Any, request: Any) -> None:
        target = request.url.join(yarl.URL(request.response.headers.get("Location", "")))
        if target.host != request.url.host or (request.url.scheme, target.scheme) == ("https", "http"):
            raise PermissionError(f"it sends to {target.scheme}://{target.host}: name that host's own URL")

    trace = aiohttp.TraceConfig()
    trace.on_request_redirect.append(refuse_others)
    plain: dict[str, Any] = {"headers": {"Accept-Encoding": "identity"}, "auto_decompress": False}  # bytes as counted
    limits = aiohttp.ClientTimeout(**_HTTP_LIMITS)
    return aiohttp.ClientSession(timeout=limits, trace_configs=[trace], **{**plain, **options})


def _with_time_for_a_file(system: Any) -> Callable[..., None]:
    """Return `get_file` of a store at http(s) with a day for its response, which a large file may take."""
    import aiohttp
    from fsspec.asyn import sync

    limits = aiohttp.ClientTimeout(**{**_HTTP_LIMITS, "total": 86400})
    return partial(sync, system.loop, partial(system._get_file, timeout=limits))  # a `timeout` of `sync` is its own


# Timeouts tolerate a late response, but not a dead connection. A file is transferred in several parts at once.
_SETTINGS: dict[str, dict[str, Any]] = {
    "s3": {"max_concurrency": 4, "config_kwargs": {"connect_timeout": 20, "read_timeout": 60}},
    "http": {"get_client": _http_client},
    "https": {"get_client": _http_client},
    "file": {"auto_mkdir": True},
}


class StoreError(OSError):
    """Raised if an operation of a store fails. The message is one line; `final`: a retry would fail, too."""

    def __init__(self, message: str, *, final: bool = False) -> None:
        super().__init__(message)
        self.final = final


@dataclass(frozen=True)
class Store:
    """A folder in an object store or file system. Names of its files are relative, with "/" between folders."""

    url: str
    _system: Any
    _root: str

    @classmethod
    def at(cls, url: str) -> Store:
        """Open the folder at a URL or path, which need not exist. Raises UserError if it cannot be opened."""
        if problem := complaint(url) if "://" in url else None:
            raise UserError(f"{without_secrets(url)} {problem}")
        from fsspec.core import url_to_fs
        from fsspec.utils import get_protocol

        protocol = {"s3a": "s3", "local": "file"}.get(get_protocol(url), get_protocol(url))
        try:
            system, root = url_to_fs(url, use_listings_cache=False, **_SETTINGS.get(protocol, {}))
        except ImportError as error:
            package = _PACKAGES.get(protocol)
            needed = f"pip install {package}" if package else without_secrets(str(error))
            raise UserError(f"{url} needs a library that is not installed: {needed}") from error
        except ValueError as error:
            raise UserError(f"{url} cannot be opened: {without_secrets(str(error))}") from error
        except Exception as error:
            raise UserError(f"{url} cannot be opened ({_words(error)}): look at the credentials") from error
        return cls(url.rstrip("/"), system, root.rstrip("/"))

    def below(self, name: str) -> Store:
        """Return the subfolder `name` as a store."""
        return Store(f"{self.url}/{name}", self._system, f"{self._root}/{name}")

    def files(self) -> dict[str, int]:
        """Return the sizes of all files in the folder and its subfolders, by name; {} if the folder does not exist."""
        sizes = {name: entry["size"] for name, entry in self._entries().items()}
        return {name: self.version(name)[0] if size is None else int(size) for name, size in sizes.items()}

    def versions(self) -> dict[str, tuple[int, str]]:
        """Return (size, version) of each file directly in the folder; the version is a text that changes with it."""
        return {name: (int(entry["size"] or 0), _version(entry)) for name, entry in self._entries(maxdepth=1).items()}

    def version(self, name: str) -> tuple[int, str]:
        """Return (size, version) of a file; the version is a text that changes with the file."""
        with self._errors("be read", name):
            entry = self._system.info(self._path(name))
            return int(entry["size"] or 0), _version(entry)

    def _entries(self, *, maxdepth: int | None = None) -> dict[str, Any]:
        # By http, fsspec by default treats a missing response as an empty folder.
        strict = {"on_error": "raise"} if "http" in self._system.protocol else {}
        with self._errors("be listed"):
            try:
                found = self._system.find(self._root, maxdepth=maxdepth, detail=True, withdirs=False, **strict)
            except FileNotFoundError:
                return {}
        start = f"{self._root}/"
        return {
            name.removeprefix(start): entry
            for name, entry in found.items()
            if name.startswith(start) and entry["type"] == "file"
        }

    def read(self, name: str, *, at_most: int) -> bytes:
        """Return the content of a file. Raises StoreError if it has more than `at_most` bytes or cannot be read."""
        with self._errors("be read", name):
            path = self._path(name)
            if (size := int(self._system.info(path)["size"])) > at_most:
                raise StoreError(f"{self.url}/{name} has {size} bytes, more than {at_most}", final=True)
            return self._system.cat_file(path)

    def head(self, name: str, *, at_most: int) -> tuple[bytes, int]:
        """Return the first `at_most` bytes of a file, and its size. Raises StoreError."""
        with self._errors("be read", name):
            path = self._path(name)
            size = int(self._system.info(path)["size"])
            part = {"start": 0, "end": at_most} if size > at_most else {}
            content: bytes = self._system.cat_file(path, **part)
            return content, size

    def pieces(self, name: str) -> Iterator[bytes]:
        """Yield the content of a file, a few megabytes at a time."""
        with self._errors("be read", name), self._system.open(self._path(name), "rb", block_size=_PIECE) as file:
            while piece := file.read(_PIECE):
                yield piece

    def write(self, name: str, content: bytes) -> None:
        """Write a file with the given content. Raises StoreError."""
        with self._errors("be written", name):
            self._make_folder(name)
            self._system.pipe_file(self._path(name), content)

    def upload(self, source: Path, name: str, moved: Moved = lambda count: None) -> None:
        """Copy a local file to the store, with progress reported to `moved`. Raises StoreError."""
        with self._errors("be written", name):
            self._make_folder(name)
            if self._system.async_impl:
                self._system.put_file(str(source), self._path(name), callback=_callback(moved))
                return
            with open_regular(source) as reading, self._system.open(self._path(name), "wb") as writing:
                while piece := reading.read(_PIECE):
                    writing.write(piece)
                    moved(len(piece))

    def download(self, name: str, target: Path, moved: Moved = lambda count: None) -> None:
        """Copy a file of the store to a local file, and create its folder. Raises StoreError."""
        target.parent.mkdir(parents=True, exist_ok=True)
        with self._errors("be read", name):
            if self._system.async_impl:
                get_file = self._system.get_file
                if "http" in self._system.protocol:
                    get_file = _with_time_for_a_file(self._system)
                get_file(self._path(name), str(target), callback=_callback(moved))
                return
            with self._system.open(self._path(name), "rb") as reading, open_new(target) as writing:
                while piece := reading.read(_PIECE):
                    writing.write(piece)
                    moved(len(piece))

    def modified(self, name: str) -> datetime:
        """Return the time at which a file was last modified. Raises StoreError."""
        with self._errors("be read", name):
            if "http" in self._system.protocol:
                return parsedate_to_datetime(self._system.info(self._path(name))["Last-Modified"])
            return self._system.modified(self._path(name))

    def remove(self, name: str) -> None:
        """Delete a file; it may be missing."""
        with self._errors("be deleted", name):
            try:
                self._system.rm_file(self._path(name))
            except FileNotFoundError:
                return

    def remove_all(self) -> None:
        """Delete the folder with all its content; it may be missing."""
        with self._errors("be deleted"):
            try:
                self._system.rm(self._root, recursive=True)
            except FileNotFoundError:
                return

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _make_folder(self, name: str) -> None:
        if not self._system.async_impl:  # object stores have no folders
            self._system.makedirs(self._path(name).rpartition("/")[0], exist_ok=True)

    @contextmanager
    def _errors(self, what: str, name: str = "") -> Iterator[None]:
        """Raise a StoreError that names the file in place of any library error within this context."""
        try:
            yield
        except (StoreError, MemoryError):
            raise
        except Exception as error:
            where = f"{self.url}/{name}" if name else self.url
            final = isinstance(error, (FileNotFoundError, PermissionError, NotADirectoryError, IsADirectoryError))
            raise StoreError(f"{where} cannot {what} ({_words(error)})", final=final) from error


_VERSIONS = ("ETag", "etag", "md5Hash", "mtime", "created", "Last-Modified")  # fields of which one tells of a change


def _version(entry: Mapping[str, Any]) -> str:
    return str(next((entry[name] for name in _VERSIONS if name in entry), ""))


def _callback(moved: Moved) -> Any:
    from fsspec.callbacks import Callback

    class Counting(Callback):
        def relative_update(self, inc: int = 1) -> None:
            moved(inc)

    return Counting()


def _words(error: BaseException) -> str:
    """Return an error as one line, without possible secrets."""
    text = without_secrets(str(error)).strip().splitlines()
    first = text[0][:200] if text else ""
    if first.startswith("{"):  # gcsfs prints the answer as JSON
        try:
            first = str(json.loads(first)["error"]["message"])[:200]
        except (ValueError, KeyError, TypeError):
            first = first[:80]
    return f"{type(error).__name__}: {first}" if first else type(error).__name__
