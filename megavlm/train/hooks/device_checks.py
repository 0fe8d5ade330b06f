"""Look for devices that compute or store wrongly: copies that differ, and micro-batches that are computed twice."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import torch.distributed as dist

from megavlm.errors import DeviceFault
from megavlm.metrics.callback import Value
from megavlm.train.hooks.hook import RankHook, Step
from megavlm.train.micro_batch_check import computed_twice
from megavlm.train.replicas import Difference, differing_copies
from megavlm.train.run import Run

Report = Callable[..., None]  # kind, iteration, reason, details of an event


class DeviceChecks(RankHook):
    """Checks the devices at every so many steps. All ranks come to the same end."""

    def __init__(self, run: Run, report: Report) -> None:
        self._engine = run.engine
        self._report = report
        options = run.config.numerics
        self._copies = options.check_weight_hash_across_dp_replicas_interval
        self._twice = options.verify_micro_batch_interval
        self._iteration = 0
        self._open = ExitStack()
        self._difference: Callable[[], Difference | None] = lambda: None

    def on_step_begin(self, iteration: int) -> None:
        """Let the step's first micro-batch be computed twice, if that is due."""
        self._iteration = iteration
        if _due(iteration, self._twice):
            self._difference = self._open.enter_context(computed_twice(self._engine.model_chunks))

    def judge(self, loss: float, norm: float | None) -> str | None:
        """Raise DeviceFault on all ranks if a computation done twice, or copies of weights on several ranks, differ."""
        if (found := self._difference()) is not None:
            self._end(found, f"computed {found.what} twice with different results")
        if not _due(self._iteration, self._copies):
            return None
        if (found := differing_copies(self._engine.model_chunks, self._engine.optimizer)) is not None:
            one = len(found.ranks) == 1
            self._end(found, f"{'differs from the others' if one else 'differ'} in {found.what}")
        return None

    def measure(self, step: Step) -> Mapping[str, Value]:
        """End the checks of a step."""
        self.leave()
        return {}

    def leave(self) -> None:
        """Let micro-batches be computed once again."""
        self._open.close()
        self._difference = lambda: None

    def _end(self, found: Difference, what: str) -> None:
        """Report the ranks and their machines, and raise DeviceFault; every rank calls it."""
        hosts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(hosts, os.environ.get("SLURMD_NODENAME") or socket.gethostname())
        names = [str(rank) for rank in found.ranks]
        ranks = f"rank {names[0]}" if len(names) == 1 else f"ranks {', '.join(names[:-1])} and {names[-1]}"
        machines = sorted({hosts[rank] for rank in found.ranks})
        line = f"{ranks} {what} (on {', '.join(machines)})"
        self._report("mismatch", self._iteration, line, culprits=list(found.ranks), module=found.what, hosts=machines)
        raise DeviceFault(
            f"iteration {self._iteration}: {line}: a device computes or stores wrongly; replace the machine, and go on "
            "from a checkpoint"
        )


def _due(iteration: int, interval: int) -> bool:
    return interval > 0 and iteration % interval == 0
