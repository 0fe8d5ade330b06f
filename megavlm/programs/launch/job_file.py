"""Keep what is known of a job's attempts in RUN_DIR/jobs, and tell how far its run came.

Both are looked up in --checkpoint-dir as well, which alone knows them where an attempt begins with an empty disk.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from megavlm.checkpoint.folders import complete
from megavlm.checkpoint.remote import complete_in
from megavlm.errors import UserError
from megavlm.files import replace_file
from megavlm.paths import read_bytes
from megavlm.programs.launch.requeue import Attempt
from megavlm.storage.store import Store, StoreError
from megavlm.storage.transfer import with_retries

_ATTEMPTS = 3  # the other machines of the job wait meanwhile
_LARGEST = 2**20  # bytes of the file
Result = TypeVar("Result")


@dataclass(frozen=True)
class History:
    """The attempts of a job that ended, and the iteration at which an open one began."""

    ended: tuple[Attempt, ...] = ()
    began: int | None = None

    @property
    def length(self) -> tuple[int, bool]:
        """Return what grows with each attempt that begins or ends."""
        return len(self.ended), self.began is not None


@dataclass(frozen=True)
class JobFile:
    """The file of one job on a run folder, and its copy in the store of the run's checkpoints (None: there is none)."""

    run_dir: Path
    job: str
    store: str | None = None

    def read(self) -> History:
        """Return the longer history of both: the disk may be new, or of a machine that left the job for a while."""
        found = [_history(self._content())] if os.path.lexists(self._path) else []
        if self.store is not None and (stored := self._ask(self._stored)):
            found.append(stored)
        return max(found, key=lambda each: each.length, default=History())

    def write(self, ended: Sequence[Attempt], began: int | None) -> None:
        """Write the history to the disk, and to the store if that answers and has no longer one."""
        content = json.dumps({"attempts": [asdict(each) for each in ended], "open": began}) + "\n"
        self._path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(self._path, content)
        if self.store is not None:
            self._ask(lambda store: self._put(store, content.encode()))

    def newest_here(self) -> int:
        """Return the iteration of the newest checkpoint in RUN_DIR, 0 if there is none."""
        return max((iteration for iteration, _ in complete(self.run_dir / "checkpoints")), default=0)

    def newest_stored(self) -> int | None:
        """Return the iteration of the newest checkpoint in the store, 0 without one, None if it does not answer."""
        if self.store is None:
            return 0
        return self._ask(lambda store: max((each.iteration for each in complete_in(store)), default=0))

    def _content(self) -> bytes:
        try:
            return read_bytes(self._path, at_most=_LARGEST)
        except OSError as error:
            raise UserError(f"{self._path} cannot be read ({error.strerror or error}): delete it") from error

    def _stored(self, store: Store) -> History | None:
        if f"{self.job}.json" not in store.below("jobs").files():
            return None
        return _history(store.read(self._name, at_most=_LARGEST))

    def _put(self, store: Store, content: bytes) -> None:
        stored = self._stored(store)
        if stored is None or stored.length < _history(content).length:
            store.write(self._name, content)

    def _ask(self, act: Callable[[Store], Result]) -> Result | None:
        """Return what `act` returns, given the store; None if that does not answer."""
        assert self.store is not None
        store = Store.at(self.store)
        try:
            return with_retries(lambda: act(store), attempts=_ATTEMPTS)
        except StoreError as error:
            print(f"job {self.job}: --checkpoint-dir: {error}. What {self.run_dir} has counts", file=sys.stderr)
            return None

    @property
    def _path(self) -> Path:
        return self.run_dir / self._name

    @property
    def _name(self) -> str:
        return f"jobs/{self.job}.json"


def _history(content: bytes) -> History:
    """Return the history in a file. Raises UserError for a file that somebody has changed."""
    try:
        written: dict[str, Any] = json.loads(content)
        return History(tuple(Attempt(**each) for each in written["attempts"]), written["open"])
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(f"the account of the job's attempts is damaged ({error}): delete RUN_DIR/jobs") from error
