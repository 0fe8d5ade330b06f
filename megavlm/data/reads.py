"""Notice a read that hangs in a thread of this process, as on a file system that does not answer.

Such a thread can be neither ended nor replaced, as a worker process can (`workers.py`). So those who wait for it look
here now and then, and end the run with the name of the sample. What a run reads before it begins, it waits for alike.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from typing import Any, TypeVar

from megavlm.errors import UserError

Result = TypeVar("Result")

_LOOK = 0.1  # seconds between two looks at reads


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
        around = self._now.get(thread)
        self._now[thread] = (name, time.monotonic())
        try:
            yield
        finally:
            if around is None:
                del self._now[thread]
            else:
                self._now[thread] = around

    def begin(self, name: Callable[[], str]) -> None:
        """Note that this thread, within `reading`, goes on with something else."""
        self._now[threading.get_ident()] = (name, time.monotonic())

    def wait(self, action: Callable[[], Result]) -> Result:
        """Return `action()`, which another thread does. Raises UserError if one of its reads takes too long."""
        done: Future[Result] = Future()

        def act() -> None:
            try:
                done.set_result(action())
            except BaseException as error:
                done.set_exception(error)

        threading.Thread(target=act, name="first reads", daemon=True).start()
        while not wait([done], timeout=_LOOK).done:
            self.check()
        return done.result()

    def __reduce__(self) -> tuple[Any, ...]:
        return Reads, (self._timeout,)  # another process has its own threads

    def check(self) -> None:
        """Raise UserError if a read takes too long; any thread may call it."""
        for name, since in list(self._now.values()):
            if self._timeout and time.monotonic() - since > self._timeout:
                raise UserError(
                    f"reading {name()} has taken {time.monotonic() - since:.0f} s (--data-worker-timeout): look at the "
                    "storage, or at that sample; if it is only slow, raise --data-worker-timeout"
                )
