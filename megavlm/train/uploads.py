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
from megavlm.checkpoint.folders import Keep
from megavlm.checkpoint.uploader import FINISH
from megavlm.resilience.phases import SAVE, Phases

_STARTS = 3  # of the process while the run waits for it
_GRACE = 20.0  # seconds that a run which ends by an error leaves to a copy


class Uploads:
    """The process that copies checkpoints. Whatever happens to it, the run goes on."""

    def __init__(self, run_dir: Path, store: str, keep: Keep) -> None:
        """Start the process on rank 0, which alone has one. Every rank makes one of these."""
        self._finished = False
        self._starts = 0
        self._job = {"run_dir": str(run_dir), "store": store, "keep": asdict(keep), "parent": os.getpid()}
        self._process: subprocess.Popen[str] | None = self._start() if dist.get_rank() == 0 else None

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
            if self._process is not None:
                status = [self._look(self._process)]
            dist.broadcast_object_list(status, src=0)
        self._finished = True
        return status[0] == 0

    def close(self) -> None:
        """End the process. What it has not copied it copies when the run goes on."""
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
        """Let the process end once all is copied."""
        self._starts += 1
        if self._process is not None:
            self.ensure()
            self._write(self._process, FINISH)

    def _look(self, process: subprocess.Popen[str]) -> int | None:
        """Return how the process ended, None while it runs. One that was killed is started again."""
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
