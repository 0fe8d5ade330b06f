"""Keep the process that copies a run's checkpoints to `--checkpoint-dir`, and wait for it when the run ends.

The process is started and not forked, because the libraries of stores use threads and connections that a fork breaks.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import torch.distributed as dist

import megavlm
from megavlm.checkpoint.retention import Keep
from megavlm.checkpoint.uploader import FINISH
from megavlm.resilience.phases import SAVE, Phases

_STARTS = 3  # of the process while the run waits for it
_GRACE = 20.0  # seconds that a run which ends by an error leaves to a copy


def _nodes(world: int) -> tuple[int, int]:
    """Return the number of nodes and of ranks on each; one node where they are unequal, or nothing tells."""
    each = int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
    return (world // each, each) if each and world % each == 0 else (1, world)


class Uploads:
    """The process of a node that copies checkpoints. Whatever happens to it, the run goes on.

    The first rank of each node has one. That of rank 0 decides what is copied, and asks the others for their part.
    """

    def __init__(self, run_dir: Path, store: str, keep: Keep) -> None:
        """Start the process if this is the first rank of a node. Every rank makes one of these."""
        rank, (nodes, ranks) = dist.get_rank(), _nodes(dist.get_world_size())
        self._leads = rank == 0
        self._finished = False
        self._job = {
            **{"run_dir": str(run_dir), "store": store, "keep": asdict(keep), "parent": os.getpid()},
            **{"nodes": (nodes, ranks), "node": rank // ranks},
        }
        self._process: subprocess.Popen[str] | None = (
            self._start() if rank % ranks == 0 and rank < nodes * ranks else None
        )

    def ensure(self) -> None:
        """Start the process again if it died: it finds by itself what is to be copied."""
        if self._process is not None and self._process.poll() is not None:
            self._process = self._start()

    def finish(self, phases: Phases) -> bool:
        """Wait until all is copied that is to be; return whether it was. Every rank calls it; none waits for long.

        A store that does not answer for ten minutes is given up.
        """
        self._tell()
        status: list[int | None] = [None]
        while status[0] is None:
            phases.enter(SAVE, "waits for the copies of checkpoints")
            if self._leads:
                status = [self._look()]
            elif status[0] is None:
                self.ensure()
            dist.broadcast_object_list(status, src=0)
        self._finished = True
        return status[0] == 0

    def close(self) -> None:
        """End the process. What it has not copied it copies when the run goes on."""
        if self._process is None:
            return
        if self._leads and not self._finished:
            self._tell()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_GRACE)
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()

    def _start(self) -> subprocess.Popen[str]:
        paths = [str(Path(megavlm.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "megavlm.checkpoint.uploader"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
            text=True,
        )
        self._write(process, json.dumps(self._job) + "\n")
        return process

    def _tell(self) -> None:
        self._starts = 1
        if self._process is not None:
            self.ensure()
            self._write(self._process, FINISH)

    def _look(self) -> int | None:
        """Return how the process ended, None while it runs. One that was killed is started again."""
        assert self._process is not None
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        status = self._process.poll()
        if status in (None, 0, 1) or self._starts == _STARTS:
            return status
        self._starts += 1
        self._process = self._start()
        self._write(self._process, FINISH)
        return None

    @staticmethod
    def _write(process: subprocess.Popen[str], line: str) -> None:
        assert process.stdin is not None
        with suppress(OSError):  # it has ended: `ensure` and `_look` see it
            process.stdin.write(line)
            process.stdin.flush()
