"""Measure Adam's update with moments on disk against moments in host memory: time and memory of the process.

    python benchmarks/disk_offload.py [--millions 256] [--folder DIR] [--quick]

Each side runs in a process of its own, on as many parameters, in tensors of 4 million numbers. `memory` is how much the
process's anonymous memory (`RssAnon` of /proc/self/status, which leaves out pages of files) grows beyond weights and
gradients, at its largest. `seconds` is the median of the steps after the first. A machine with memory to spare keeps
the file's pages; where they are dropped before each step, reads come from the disk. Appends to
`benchmarks/records/disk_offload.jsonl`, unless `--quick`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from record import append, circumstances

from megavlm.optim.elementwise import ElementwiseOptimizer
from megavlm.optim.rules import ADAMW
from megavlm.optim.stores import DiskStore, HostStore

TENSOR = 2**22  # numbers of a parameter
SIDES = ("host", "disk", "disk, page cache dropped")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--millions", type=int, default=256, help="parameters, in 2²⁰")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "megavlm-disk", help="on a disk")
    parser.add_argument("--quick", action="store_true", help="a few parameters; no record")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    given = parser.parse_args()
    millions = 16 if given.quick else given.millions
    if given.side:
        print(json.dumps(measured(given.side, millions, given.folder)))
        return
    record: dict[str, Any] = {**circumstances(), "millions": millions, "threads": torch.get_num_threads(), "sides": {}}
    for side in SIDES:
        command = [sys.executable, __file__, "--side", side, "--millions", str(millions), "--folder", str(given.folder)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        record["sides"][side] = json.loads(done.stdout)
        print(side, record["sides"][side])
    if not given.quick:
        append("disk_offload", record)


def measured(side: str, millions: int, folder: Path, *, steps: int = 4) -> dict[str, float]:
    """Return the seconds of a step and the GiB that moments and buffers take."""
    values = [torch.zeros(TENSOR) for _ in range(max(1, millions * 2**20 // TENSOR))]
    for each in values:
        each.grad = torch.full_like(each, 1e-3)
    before = _anonymous()
    store = HostStore() if side == "host" else DiskStore(folder, values, ADAMW.state)
    optimizer = ElementwiseOptimizer(values, ADAMW, store)
    seconds = []
    with _Peak() as peak:
        for _ in range(steps):
            if side.endswith("dropped"):
                assert isinstance(store, DiskStore)
                _drop(store)
            began = time.perf_counter()
            optimizer.step()
            seconds.append(time.perf_counter() - began)
    return {"seconds": statistics.median(seconds[1:]), "memory": (peak.largest - before) / 2**30}


def _drop(store: DiskStore) -> None:
    """Write the file's pages to the disk and take them out of memory."""
    descriptor = store._scratch._file.fileno()
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def _anonymous() -> int:
    """Return the bytes of this process's memory that are no file's."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


class _Peak:
    """The largest anonymous memory of this process, looked at every 20 ms."""

    def __enter__(self) -> _Peak:
        self.largest, self._ended = _anonymous(), threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(0.02):
            self.largest = max(self.largest, _anonymous())


if __name__ == "__main__":
    main()
