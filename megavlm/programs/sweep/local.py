"""Train variants on this machine, several at a time, each under a torchrun of its own."""

from __future__ import annotations

import os
import queue
import signal
import socket
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from megavlm.errors import UserError
from megavlm.files import open_to_append
from megavlm.programs.doctor.collect import said
from megavlm.programs.launch import agent, local
from megavlm.programs.launch.exit_file import read_exit
from megavlm.programs.launch.job import Job
from megavlm.programs.sweep.grid import Grid, Variant
from megavlm.programs.sweep.state import run_dir_of
from megavlm.resilience.status import STOPPED


class Runs:
    """Runs that are under way. A signal is passed on to all of them, and no other is started after it."""

    def __init__(self, processes: int, slots: int, gpus: Sequence[str] = ()) -> None:
        self._processes, self._gpus = processes, gpus
        self._slots: queue.SimpleQueue[int] = queue.SimpleQueue()
        for slot in range(slots):
            self._slots.put(slot)
        self._running: set[subprocess.Popen[bytes]] = set()
        self.stopping = False

    def _devices(self, slot: int) -> dict[str, str]:
        """Return the variable that gives the processes of a slot GPUs of their own, where there are any."""
        mine = self._gpus[slot * self._processes : (slot + 1) * self._processes]
        return {"CUDA_VISIBLE_DEVICES": ",".join(mine)} if mine else {}

    def stop(self, number: int, _: Any = None) -> None:
        self.stopping = True
        for each in list(self._running):
            if each.poll() is None:
                each.send_signal(number)

    def train(self, variant: Variant) -> int | None:
        """Train a variant to its end; return the exit status of the run, None if it was not started."""
        if self.stopping:
            return None
        slot = self._slots.get()
        run_dir = run_dir_of(variant)
        run_dir.parent.mkdir(parents=True, exist_ok=True)
        try:
            with (
                tempfile.TemporaryDirectory() as folder,
                open_to_append(run_dir.with_name(f"{run_dir.name}.out")) as output,
            ):
                exit_file = Path(folder) / "exit"
                job = Job(1, self._processes, variant.flags)
                (command,) = local.specification(job, port=_free_port(), exit_file=exit_file)
                started = subprocess.Popen(
                    command.words,
                    env={**os.environ, **command.environment, **self._devices(slot)},
                    stdout=output,
                    stderr=output,
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,
                )
                self._running.add(started)
                status = started.wait()
                self._running.discard(started)
                ended = read_exit(exit_file)
                return status if ended is None else ended
        finally:
            self._slots.put(slot)


def train_here(grid: Grid, variants: Sequence[Variant], *, parallel: int, say: Callable[[str], None]) -> int:
    """Train variants, `parallel` at a time; return 0 if all finished, 75 if a signal stopped them, else 1."""
    gpus = gpus_here()
    if gpus and parallel * grid.processes > len(gpus):
        raise UserError(
            f"--parallel {parallel} variants of {grid.processes} processes need {parallel * grid.processes} GPUs, and "
            f"{len(gpus)} are here: train fewer at a time"
        )
    runs = Runs(grid.processes, parallel, gpus)
    before = {number: signal.signal(number, runs.stop) for number in agent.SIGNALS}
    worst = 0
    try:
        with ThreadPoolExecutor(parallel) as threads:
            waiting = {threads.submit(runs.train, variant): variant for variant in variants}
            for number, done in enumerate(as_completed(waiting), start=1):
                status, variant = done.result(), waiting[done]
                if status is not None:
                    how = {0: "finished", STOPPED: "stopped"}.get(status, f"failed with {status}: see its .out file")
                    say(f"{number} of {len(variants)}: {variant.name} {how}")
                worst = max(worst, 0 if status in (0, None, STOPPED) else 1)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return STOPPED if runs.stopping else worst


def gpus_here() -> list[str]:
    """Return the GPUs that this program may use, as CUDA_VISIBLE_DEVICES names them; none on a machine without."""
    listed = said("nvidia-smi", "--list-gpus") or ""
    every = [str(number) for number, line in enumerate(listed.splitlines()) if line.startswith("GPU")]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return every if visible is None or not every else [each for each in visible.split(",") if each]


def _free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
        return port
