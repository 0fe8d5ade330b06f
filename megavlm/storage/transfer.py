"""Transfer files to and from stores in parallel, with retries of failed transfers and a timeout for silent stores."""

from __future__ import annotations

import functools
import os
import queue
import random
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from megavlm.storage.store import Moved, Store, StoreError

THREADS = 4  # files at once; s3fs holds up to four parts of 50 MB of each in memory
ATTEMPTS = 5
PATIENCE = 300.0  # timeout in seconds without any transferred byte; a slow connection may take that long for a part
_LAST = 5.0  # seconds to wait for transfers in progress when one file has failed
Result = TypeVar("Result")
_FIRST_PAUSE = 0.5  # seconds; each further one is twice as long …
_LONGEST_PAUSE = 30.0  # … up to this
_ATTEMPTS = 1000  # most attempts to read a file; a worker process is replaced after a timeout long before


def move(
    names: Sequence[str],
    act: Callable[[str, Moved], None],
    *,
    go_on: Callable[[int], None] = lambda moved: None,
    patience: float = PATIENCE,
) -> int:
    """Call `act(name, moved)` for each name in parallel threads; return the total number of bytes moved.

    `go_on` is called about once a second with the bytes so far. Raises the error of the first name that failed after
    all retries, and StoreError if nothing has moved for `patience` seconds. Then other transfers in progress get a few
    seconds to end, so that they do not overlap with the next attempt; threads that hang are abandoned.
    """
    waiting: queue.SimpleQueue[str] = queue.SimpleQueue()
    for name in names:
        waiting.put(name)
    ended: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
    state, stop, reported = _Count(), threading.Event(), time.monotonic()

    def work() -> None:
        while not stop.is_set():
            try:
                name = waiting.get_nowait()
            except queue.Empty:
                return
            try:
                with_retries(lambda name=name: act(name, state.add), stop)  # type: ignore[misc]
            except BaseException as error:
                ended.put(error)
                return
            ended.put(None)

    threads = [threading.Thread(target=work, daemon=True) for _ in range(min(THREADS, len(names)))]
    for thread in threads:
        thread.start()
    done = 0
    try:
        while done < len(names):
            with suppress(queue.Empty):
                if (error := ended.get(timeout=1.0)) is not None:
                    raise error
                done, state.last = done + 1, time.monotonic()
            if time.monotonic() - reported > 1.0:
                go_on(state.bytes)
                reported = time.monotonic()
            if time.monotonic() - state.last > patience:
                raise StoreError(f"nothing has moved for {patience:.0f} s: the store does not answer")
    finally:
        stop.set()
        until = time.monotonic() + min(patience, _LAST)
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))
    return state.bytes


class _Count:
    """Counter of the bytes moved by several threads, with the time of the last change."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.bytes, self.last = 0, time.monotonic()

    def add(self, count: int) -> None:
        with self._lock:
            self.bytes += count
            self.last = time.monotonic()


def with_retries(act: Callable[[], Result], stop: threading.Event | None = None, *, attempts: int = ATTEMPTS) -> Result:
    """Call `act` and return its result, with retries after a StoreError: at most `attempts` calls, until `stop`.

    Raises the last error; a final error is raised at once.
    """
    stop, pause = stop or threading.Event(), _FIRST_PAUSE
    for _ in range(attempts - 1):
        try:
            return act()
        except StoreError as error:
            if error.final or stop.is_set():
                raise
            stop.wait(pause * random.uniform(0.5, 1.5))  # so that not all nodes come back at once
            pause = min(2 * pause, _LONGEST_PAUSE)
    return act()


@dataclass(frozen=True)
class StoredFile:
    """A file in the folder at a URL; records that name such a file hold it, and are pickled with it."""

    folder: str
    name: str

    def read(self, *, at_most: int) -> bytes:
        """Return the content, retrying until the store answers.

        Raises StoreError if the file does not exist, may not be read or has more than `at_most` bytes.
        """
        store = _store(self.folder, os.getpid())
        return with_retries(lambda: store.read(self.name, at_most=at_most), attempts=_ATTEMPTS)

    def head(self, *, at_most: int) -> tuple[bytes, int]:
        """Return the first `at_most` bytes of the file and its size, retrying until the store answers.

        Raises StoreError if the file does not exist or may not be read.
        """
        store = _store(self.folder, os.getpid())
        return with_retries(lambda: store.head(self.name, at_most=at_most), attempts=_ATTEMPTS)

    def __str__(self) -> str:
        return f"{self.folder}/{self.name}"


@functools.lru_cache(maxsize=16)
def _store(url: str, process: int) -> Store:
    """Return this process's connection to the store; each process opens its own, because none survives a fork."""
    return Store.at(url)
