"""Manage the process that copies a run's checkpoints to `--checkpoint-dir`, and wait for it when the run ends.

The process is spawned and not forked, because the libraries of stores use threads and connections that a fork breaks.
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
from megavlm.checkpoint.folders import Keep
from megavlm.checkpoint.uploader import FINISH
from megavlm.resilience.phases import SAVE, Phases

_STARTS = 3  # of the process while the run waits for it
_GRACE = 20.0  # seconds that a run which ends by an error leaves to a copy


class Uploads:
    """Handle of the process that copies checkpoints. A failure of the process does not end the run's training."""

    def __init__(self, run_dir: Path, store: str, keep: Keep) -> None:
        """Start the process on rank 0 only; every rank must create an `Uploads`."""
        self._finished = False
        self._starts = 0
        self._job = {"run_dir": str(run_dir), "store": store, "keep": asdict(keep), "parent": os.getpid()}
        self._process: subprocess.Popen[str] | None = self._start() if dist.get_rank() == 0 else None

    def ensure(self) -> None:
        """Restart the process if it died; it finds the checkpoints to be copied by itself."""
        if self._process is not None and self._process.poll() is not None:
            self._process = self._start()

    def finish(self, phases: Phases) -> bool:
        """Wait until all checkpoints are copied; return whether they were. Every rank calls it; none blocks for long.

        A store that does not answer for ten minutes is given up.
        """
        self._tell()
        status: list[int | None] = [None]
        while status[0] is None:
            phases.enter(SAVE, "waits for the copies of checkpoints")
            if self._process is not None:
                status = [self._look(self._process)]
            dist.broadcast_object_list(status, src=0)
        self._finished = True
        return status[0] == 0

    def close(self) -> None:
        """End the process. Checkpoints that are not copied yet are copied when the run resumes."""
        if self._process is None:
            return
        if not self._finished:
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
        """Tell the process to end once all checkpoints are copied."""
        self._starts += 1
        if self._process is not None:
            self.ensure()
            self._write(self._process, FINISH)

    def _look(self, process: subprocess.Popen[str]) -> int | None:
        """Return the exit status of the process, None while it runs. A process that was killed is restarted."""
        with suppress(subprocess.TimeoutExpired):
            process.wait(1.0)
        status = process.poll()
        if status in (None, 0, 1) or self._starts == _STARTS:
            return status
        self._tell()
        return None

    @staticmethod
    def _write(process: subprocess.Popen[str], line: str) -> None:
        assert process.stdin is not None
        with suppress(OSError):  # it has ended: `ensure` and `_look` see it
            process.stdin.write(line)
            process.stdin.flush()
