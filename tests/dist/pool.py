"""Worker processes that stay: the gloo world starts once, then runs one case after another."""

from __future__ import annotations

import atexit
import os
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from tests.dist import forked


class Pool:
    """`world` processes in one gloo world. A case that fails or hangs ends the pool; the next use needs a new one."""

    def __init__(self, world: int) -> None:
        context = forked.context()
        self.world = world
        self.broken = False
        self._ends: list[Connection] = []
        self._processes = []
        for rank in range(world):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(rank, world, theirs))
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
        """Call a module-level function on every rank; returns their results by rank."""
        for end in self._ends:
            end.send((function, args))
        results = []
        for rank, end in enumerate(self._ends):
            if not end.poll(timeout):
                self.close()
                raise AssertionError(f"rank {rank} of {self.world} gave no result within {timeout} s")
            try:
                succeeded, value = end.recv()
            except EOFError as error:
                self.close()
                raise AssertionError(f"rank {rank} of {self.world} died") from error
            if not succeeded:
                self.close()
                raise AssertionError(f"rank {rank} of {self.world}:\n{value}")
            results.append(value)
        return results

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


def _work(rank: int, world: int, end: Connection) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank)}
    import torch.distributed as dist

    from megavlm import backend

    chosen = backend.activate()
    if rank == 0:  # takes any free port, and holds it before another rank hears of it
        store = dist.TCPStore("127.0.0.1", 0, world, is_master=True, wait_for_workers=False)
        end.send(store.port)
    else:
        store = dist.TCPStore("127.0.0.1", end.recv(), world, is_master=False)
    dist.init_process_group(chosen.communication, store=store, rank=rank, world_size=world)
    while True:
        try:
            function, args = end.recv()
        except EOFError:
            return
        try:
            end.send((True, function(*args)))
        except Exception:
            end.send((False, traceback.format_exc()))
