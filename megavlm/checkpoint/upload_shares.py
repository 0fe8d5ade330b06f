"""Let each node copy what its ranks wrote to a store. The nodes share RUN_DIR, and tell each other there.

The process of rank 0 asks with a folder in RUN_DIR/uploads, and those of other nodes answer with a file in it. A node
that does not answer loses nothing: rank 0's looks in the store for what is missing, and copies that itself.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from megavlm.checkpoint import remote
from megavlm.checkpoint.manifest import attempt_of, read_manifest
from megavlm.checkpoint.retention import Holds
from megavlm.files import replace_file
from megavlm.storage.store import Store

_LOOK = 0.2  # seconds
_SILENCE = 120.0  # seconds without a sign of a node, after which nobody waits for it; NFS shows files a minute late
_DONE = "done"


@dataclass(frozen=True)
class Nodes:
    """The nodes of a run, whose ranks follow one another."""

    folder: Path  # RUN_DIR/uploads
    number: int = 1
    ranks_each: int = 1

    def share(self, names: Iterable[str], node: int) -> list[str]:
        """Return the files that a node copies: those of tensors that its ranks wrote, and the first one all others."""
        return [name for name in names if self._node_of(name) == node]

    def ask(self, checkpoint: Path) -> None:
        """Ask the other nodes to copy their files of a checkpoint."""
        if self.number > 1:
            self._request(checkpoint).mkdir(parents=True, exist_ok=True)

    def wait(self, checkpoint: Path, go_on: remote.GoOn) -> None:
        """Wait until the other nodes have answered, or give no sign any more."""
        request, before, last = self._request(checkpoint), None, time.monotonic()
        while self.number > 1 and time.monotonic() - last < _SILENCE:
            signs = [self._sign(request / str(node)) for node in range(1, self.number)]
            if all(text == _DONE for text, _ in signs):
                break
            if signs != before:
                before, last = signs, time.monotonic()
            go_on(0)
            time.sleep(_LOOK)
        over = request.with_name(f"over-{request.name}")
        with suppress(OSError):
            request.rename(over)  # at once: a node that still saw the folder without its answer would copy again
        shutil.rmtree(over, ignore_errors=True)

    def asked(self, root: Path, node: int) -> Iterator[tuple[Path, Path]]:
        """Yield the checkpoints of which a node has to copy its files, and where it answers."""
        for request in sorted(self.folder.glob("iter_*.*"), reverse=True):
            name, _, attempt = request.name.partition(".")
            is_there = (root / name).is_dir() and attempt_of(root / name) == attempt
            if is_there and self._sign(request / str(node))[0] != _DONE:
                yield root / name, request / str(node)

    def _request(self, checkpoint: Path) -> Path:
        return self.folder / f"{checkpoint.name}.{attempt_of(checkpoint)}"

    def _node_of(self, name: str) -> int:
        writer = name[2:].partition("_")[0] if name.startswith("__") else ""
        return int(writer) // self.ranks_each % self.number if writer.isdecimal() else 0

    @staticmethod
    def _sign(file: Path) -> tuple[str, float]:
        with suppress(OSError):
            return file.read_text(), file.stat().st_mtime
        return "", 0.0


def _touch(sign: Path, moved: int) -> None:
    sign.touch()


def answer(nodes: Nodes, node: int, root: Path, store: Store) -> bool:
    """Copy a node's files of the checkpoints that are asked for; return whether there are any. Raises StoreError."""
    copied = False
    for checkpoint, sign in nodes.asked(root, node):
        holds = Holds()
        try:
            if not holds.add(checkpoint):
                continue
            replace_file(sign, "")
            names = nodes.share(read_manifest(checkpoint), node)
            remote.send(checkpoint, store, names, done=set(), go_on=partial(_touch, sign))
            replace_file(sign, _DONE)
            copied = True
        except FileNotFoundError:  # nobody waits for the answer any more
            continue
        finally:
            holds.release()
    return copied
