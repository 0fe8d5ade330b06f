"""Worker processes that stay: torch, megatron-core and the gloo world start once, then run one case after another."""

from __future__ import annotations

import atexit
import multiprocessing as mp
import os
import socket
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any


class Pool:
    """`world` processes in one gloo world. A case that fails or hangs ends the pool; the next use needs a new one."""

    def __init__(self, world: int) -> None:
        context = mp.get_context("spawn")
        self.world = world
        self.broken = False
        port = _free_port()
        self._ends: list[Connection] = []
        self._processes = []
        for rank in range(world):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(rank, world, port, theirs))
            process.start()
            theirs.close()
            self._ends.append(ours)
            self._processes.append(process)
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


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def _work(rank: int, world: int, port: int, end: Connection) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank)}
    import warnings

    warnings.simplefilter("ignore")
    import torch
    import torch.distributed as dist

    from megavlm import backend

    torch.set_num_threads(1)
    chosen = backend.activate()
    dist.init_process_group(chosen.communication, init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    while True:
        try:
            function, args = end.recv()
        except EOFError:
            return
        try:
            end.send((True, function(*args)))
        except Exception:
            end.send((False, traceback.format_exc()))
