"""Worker processes that stay: the gloo world starts once, then runs one case after another."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import psutil

from tests.support import forked

IDLE = 0.005  # share of a core: a rank that waits for others uses 0.002, one on a machine with a load of 100 has 0.02

# A gloo group has three threads, one of which wakes up a hundred times a second; a layout has up to 25 groups.
MOST_THREADS = 300
MINUTES = 30  # after which a collective that waits gives up: torch's default for gloo


class Pool:
    """`world` processes in one gloo world. A case that fails or hangs ends the pool; the next use needs a new one."""

    def __init__(self, world: int) -> None:
        context = forked.context()
        self.world = world
        self.broken = False
        self._ends: list[Connection] = []
        self._processes = []
        folder = tempfile.mkdtemp()
        self._stack_files = [f"{folder}/rank{rank}" for rank in range(world)]
        for rank in range(world):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(rank, world, theirs, self._stack_files[rank]))
            process.start()
            theirs.close()
            self._ends.append(ours)
            self._processes.append(process)
        port = self._ends[0].recv()
        for end in self._ends[1:]:
            end.send(port)
        # Not daemons: those may have no children, and a checkpoint is written by some.
        atexit.register(self.close)

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = 300) -> list[Any]:
        """Call a module-level function on every rank; returns their results by rank.

        The ranks are taken to be stuck where all of them together have used next to no processor time for `timeout`
        seconds: on a busy machine a case may take long.
        """
        for end in self._ends:
            end.send((function, args))
        results: dict[int, Any] = {}
        used = self._processor_seconds()
        while len(results) < self.world:  # whichever rank is first: others may wait for one that failed
            waiting = [end for rank, end in enumerate(self._ends) if rank not in results]
            ready = wait(waiting, timeout)
            if not ready:
                before, used = used, self._processor_seconds()
                if used - before > IDLE * self.world * timeout:
                    continue
                silent = sorted(set(range(self.world)) - set(results))
                stacks = "\n".join(f"rank {rank}:\n{self._stacks(rank)}" for rank in silent)
                self.close()
                raise AssertionError(
                    f"ranks {silent} of {self.world} gave no result and did nothing for {timeout} s\n{stacks}"
                )
            rank = next(rank for rank, end in enumerate(self._ends) if end is ready[0])
            try:
                succeeded, value = self._ends[rank].recv()
            except (EOFError, ConnectionResetError) as error:
                self.close()
                raise AssertionError(f"rank {rank} of {self.world} died") from error
            if not succeeded:
                self.close()
                raise AssertionError(f"rank {rank} of {self.world}:\n{value}")
            results[rank] = value
        return [results[rank] for rank in range(self.world)]

    def _processor_seconds(self) -> float:
        """What the ranks and their children have used."""
        total = 0.0
        for process in self._processes:
            with contextlib.suppress(psutil.Error):
                rank = psutil.Process(process.pid)
                for each in (rank, *rank.children(recursive=True)):
                    total += sum(each.cpu_times()[:4])  # its own and its ended children's, user and system
        return total

    def _stacks(self, rank: int) -> str:
        """Where the threads of a silent rank are; SIGUSR2 makes `faulthandler` write that down."""
        process = self._processes[rank]
        if process.pid is None or not process.is_alive():
            return "(the process has ended)"
        os.kill(process.pid, signal.SIGUSR2)
        time.sleep(0.5)
        with open(self._stack_files[rank]) as file:
            return file.read()

    def close(self) -> None:
        self.broken = True
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()


class Pools:
    """One pool for each world size, started when first asked for."""

    def __init__(self) -> None:
        self._pools: dict[int, Pool] = {}

    def __call__(self, world: int) -> Pool:
        if world not in self._pools or self._pools[world].broken:
            self._pools[world] = Pool(world)
        return self._pools[world]

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()


def _work(rank: int, world: int, end: Connection, stack_file: str) -> None:
    faulthandler.register(signal.SIGUSR2, open(stack_file, "w"), all_threads=True)  # noqa: SIM115 (open while it runs)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank)}
    import torch
    import torch.distributed as dist

    from megavlm import backend

    chosen = backend.activate()
    from megavlm.parallel.groups import destroy_groups
    from megavlm.parallel.rendezvous import Meeting, start

    if rank == 0:  # takes any free port, and holds it before another rank hears of it
        store = dist.TCPStore("127.0.0.1", 0, world, is_master=True, wait_for_workers=False)
        end.send(store.port)
    else:
        store = dist.TCPStore("127.0.0.1", end.recv(), world, is_master=False)
    start(chosen, timeout_minutes=MINUTES, meeting=Meeting(store, rank, world), shared_devices=True)
    while True:
        try:
            function, args = end.recv()
        except EOFError:
            return
        try:
            torch.manual_seed(2)  # as in tests/conftest.py
            result = function(*args)
            threads = len(os.listdir("/proc/self/task"))
            if threads > MOST_THREADS:
                raise RuntimeError(f"{threads} threads: this case or one before it left process groups: Engine.close()")
            end.send((True, result))
        except Exception:
            end.send((False, traceback.format_exc()))
        else:
            destroy_groups()  # while the test looks at results: each of their threads wakes up all the time
