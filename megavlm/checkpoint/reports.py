"""What the writers of a save tell each other, in files beside the checkpoint: where each rank's items are.

The reports stay until the checkpoint counts: a writer that takes the place of one that died in the middle finds them.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.storage import WriteResult

from megavlm.checkpoint.manifest import TENSORS, FileSum
from megavlm.checkpoint.tensor_files import NotFinite, SaveError, Written
from megavlm.files import replace_file

PATIENCE = 120.0  # seconds in which a writer writes nothing until it is given up
_LOOK = 0.05  # seconds between looks for reports


class Reports:
    """The reports of one save, in a folder of their own, which is swept up like what unfinished saves leave."""

    def __init__(self, folder: Path) -> None:
        """Use `folder`, which is made when the first report is left."""
        self._folder = folder

    def leave(self, rank: int, written: Written | None, error: str | None, not_finite: str | None = None) -> None:
        """Report for a rank: what it has written, or why it has not. The report appears whole or not at all."""
        content: dict[str, Any] = {"error": error, "not_finite": not_finite}
        if written is not None:
            content["items"] = [
                [
                    each.index.fqn,
                    None if each.index.offset is None else list(each.index.offset),
                    each.index.index,
                    each.storage_data.relative_path,
                    each.storage_data.offset,
                    each.storage_data.length,
                ]
                for each in written.results
            ]
            content["sums"] = {name: [each.bytes, each.crc32, each.items] for name, each in written.sums.items()}
        self._folder.mkdir(parents=True, exist_ok=True)
        replace_file(self._folder / f"{rank}.json", json.dumps(content))

    def of(self, rank: int) -> Written | None:
        """Return what a rank has written; None if it has not reported. Raises SaveError if it reports a failure."""
        try:
            content = json.loads((self._folder / f"{rank}.json").read_bytes())
        except FileNotFoundError:
            return None
        if content["not_finite"] is not None:
            raise NotFinite(content["not_finite"])
        if content["error"] is not None:
            raise SaveError(content["error"])
        results = [
            WriteResult(
                MetadataIndex(name, None if offset is None else torch.Size(offset), number),
                length,
                _StorageInfo(file, start, length),
            )
            for name, offset, number, file, start, length in content["items"]
        ]
        return Written(results, {name: FileSum(*each) for name, each in content["sums"].items()})

    def of_all(self, world: int, checkpoint: Path, go_on: Callable[[], None]) -> list[Written]:
        """Wait for the reports of all ranks and return them; `go_on` is called meanwhile.

        Raises SaveError for a rank that failed, and for those whose files in `checkpoint` do not grow any more.
        """
        found: dict[int, Written] = {}
        last, size = time.monotonic(), 0
        while True:
            names = set(os.listdir(self._folder))
            for rank in range(world):
                if rank not in found and f"{rank}.json" in names and (written := self.of(rank)) is not None:
                    found[rank] = written
            if len(found) == world:
                return [found[rank] for rank in range(world)]
            grown = len(found) + sum(path.stat().st_size for path in checkpoint.glob(f"*{TENSORS}"))
            if grown != size:
                last, size = time.monotonic(), grown
            if time.monotonic() - last > PATIENCE:
                missing = sorted(set(range(world)) - found.keys())
                raise SaveError(f"the writers of ranks {missing} wrote nothing for {PATIENCE:.0f} s")
            go_on()
            time.sleep(_LOOK)
