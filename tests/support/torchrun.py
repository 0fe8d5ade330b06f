"""The program under torchrun, as a user starts it, for tests that kill parts of it or send them signals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import psutil

from tests.support.forked import PATIENCE, ROOT
from tests.support.training import SMALL

# Two small layers: most of a run is imports.
TINY = [*SMALL, "--set", "model.vision.num_layers=1", "--set", "model.language.num_layers=2"]

WITHOUT_END = [word for word, before in zip(TINY, ["", *TINY], strict=False) if "--train-iters" not in (word, before)]


class Launched:
    """A torchrun (or plain python, without `launcher`) of `pretrain_vlm.py` in its own session; a context manager that
    leaves no process behind."""

    def __init__(
        self,
        argv: Sequence[str],
        run_dir: Path,
        *,
        launcher: Sequence[str] | None,
        env: dict[str, str] | None = None,
        program: str = "pretrain_vlm.py",
    ) -> None:
        self.run_dir = run_dir
        self._program = program
        run_dir.mkdir(parents=True, exist_ok=True)
        torchrun = [] if launcher is None else ["-m", "torch.distributed.run", *launcher]
        command = [sys.executable, *torchrun, program, *argv, "--run-dir", str(run_dir)]
        self._seen: dict[int, psutil.Process] = {}
        with (run_dir / "output").open("ab") as output:
            self.process = subprocess.Popen(
                command,
                cwd=ROOT,
                stdout=output,
                stderr=output,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": str(ROOT), **(env or {})},
            )

    def __enter__(self) -> Launched:
        return self

    def __exit__(self, *_: object) -> None:
        for process in (
            [*self.alive(), psutil.Process(self.process.pid)] if self.process.poll() is None else self.alive()
        ):
            with_suppressed(process.kill)
        self.process.wait()

    def ranks(self) -> list[psutil.Process]:
        """The processes of the ranks, in order."""
        found = [each for each in self._children() if self._program in " ".join(_command(each))]
        own = [each for each in found if _command(each)[1:2] != ["-c"] and each.ppid() == self.process.pid]
        return sorted(own, key=lambda each: int(each.environ()["RANK"]))

    def workers(self) -> list[psutil.Process]:
        """The data workers, of all ranks."""
        return [each for each in self._children() if "spawn_main" in " ".join(_command(each))]

    def alive(self) -> list[psutil.Process]:
        """All processes below the launcher that still run, orphans included."""
        self._children()
        return [each for each in self._seen.values() if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]

    def _children(self) -> list[psutil.Process]:
        try:
            found = psutil.Process(self.process.pid).children(recursive=True)
        except psutil.Error:
            return []
        for each in found:
            self._seen.setdefault(each.pid, each)
        return found

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Wait until something is so; the run must not end before."""
        end = time.monotonic() + PATIENCE
        while not condition():
            assert self.process.poll() is None, self.output()
            assert time.monotonic() < end, self.output()
            self._children()
            time.sleep(0.05)

    def wait_for_iteration(self, iteration: int) -> None:
        """Wait until the run has written the metrics of an iteration."""
        self.wait_for(lambda: last_iteration(self.run_dir) >= iteration)

    def send(self, number: signal.Signals, *processes: psutil.Process | subprocess.Popen[bytes]) -> None:
        for process in processes:
            with_suppressed(partial(os.kill, process.pid, number))

    def status(self) -> int:
        """Wait for the end; returns the exit status."""
        return self.process.wait(PATIENCE)

    def output(self) -> str:
        return (self.run_dir / "output").read_text(errors="replace")


class Lasting:
    """A run folder, and the flags of what trains in it. How long it trains is in a file, so that a test can let it end
    once it has disturbed it, however fast it is.
    """

    def __init__(self, run_dir: Path, *flags: str, iterations: int = 20_000) -> None:
        self.run_dir, self._config = run_dir, run_dir.with_suffix(".yaml")
        self.last(iterations)
        self.flags = ["--config", str(self._config), *WITHOUT_END, *flags]

    def last(self, iteration: int) -> None:
        """Let attempts that begin from now on train to this iteration."""
        self._config.write_text(f"train: {{train_iters: {iteration}}}\n")


def last_iteration(run_dir: Path) -> int:
    """The last iteration in metrics.jsonl; 0 without one."""
    path = run_dir / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    whole = [line for line in lines if line.endswith(b"\n")]
    return json.loads(whole[-1])["iteration"] if whole else 0


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def with_suppressed(action: Callable[[], object]) -> None:
    """Do something to a process that may have ended."""
    try:
        action()
    except (psutil.Error, ProcessLookupError):
        return


def kill_tree(pid: int) -> None:
    """End a process and all that it started."""
    try:
        top = psutil.Process(pid)
        processes = [top, *top.children(recursive=True)]
    except psutil.Error:
        return
    for process in processes:
        with_suppressed(process.kill)
