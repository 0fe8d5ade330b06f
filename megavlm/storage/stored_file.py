"""A file in a store that is read whole or in part, again each time, by whatever process wants it."""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass

from megavlm.storage.store import Store
from megavlm.storage.transfer import with_retries

_ATTEMPTS = 1000  # at most; who waits for a worker process replaces it long before


@dataclass(frozen=True)
class StoredFile:
    """A file of the folder at a URL. It is pickled with the record that names it."""

    folder: str
    name: str

    def read(self, *, at_most: int) -> bytes:
        """Return the content, for as long as it takes the store to answer. Raises StoreError for a file that is not
        there, may not be read or is too large.
        """
        store = _store(self.folder, os.getpid())
        return with_retries(lambda: store.read(self.name, at_most=at_most), attempts=_ATTEMPTS)

    def head(self, *, at_most: int) -> tuple[bytes, int]:
        """Return the first bytes of the file, and its size, as patiently. Raises StoreError as `read` does."""
        store = _store(self.folder, os.getpid())
        return with_retries(lambda: store.head(self.name, at_most=at_most), attempts=_ATTEMPTS)

    def __str__(self) -> str:
        return f"{self.folder}/{self.name}"


@functools.lru_cache(maxsize=16)
def _store(url: str, process: int) -> Store:
    """Return this process's connection to the store; each process opens its own, because none survives a fork."""
    return Store.at(url)
