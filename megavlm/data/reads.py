"""Notice a read that hangs in a thread of this process, as on a file system that does not answer.

Such a thread can be neither ended nor replaced, as a worker process can (`workers.py`). So those who wait for it look
here now and then, and end the run with the name of the sample.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from megavlm.errors import UserError


class Reads:
    """What the threads of this process are reading, and since when."""

    def __init__(self, timeout: float) -> None:
        """A read may take `timeout` seconds (0: for ever)."""
        self._timeout = timeout
        self._now: dict[int, tuple[Callable[[], str], float]] = {}  # by thread

    @contextmanager
    def reading(self, name: Callable[[], str]) -> Iterator[None]:
        """Note that this thread reads; `name()` says what, and is called if it hangs."""
        thread = threading.get_ident()
        self._now[thread] = (name, time.monotonic())
        try:
            yield
        finally:
            self._now.pop(thread, None)

    def begin(self, name: Callable[[], str]) -> None:
        """Note that this thread, within `reading`, goes on with something else."""
        self._now[threading.get_ident()] = (name, time.monotonic())

    def check(self) -> None:
        """Raise UserError if a read takes too long; any thread may call it."""
        for name, since in list(self._now.values()):
            if self._timeout and time.monotonic() - since > self._timeout:
                raise UserError(
                    f"reading {name()} has taken {time.monotonic() - since:.0f} s (--data-worker-timeout): look at the "
                    "storage, or at that sample; if it is only slow, raise --data-worker-timeout"
                )
