"""Look for devices that compute or store wrongly: copies that differ, and micro-batches that are computed twice."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch.distributed as dist

from megavlm.errors import DeviceFault
from megavlm.train.build import Run
from megavlm.train.engine import Judge
from megavlm.train.micro_batch_check import computed_twice
from megavlm.train.replicas import Difference, differing_copies

Report = Callable[..., None]  # kind, iteration, reason, details of an event


class DeviceChecks:
    """Checks the devices at every so many steps. All ranks come to the same end."""

    def __init__(self, run: Run, report: Report) -> None:
        self._run = run
        self._report = report
        options = run.config.numerics
        self._copies = options.check_weight_hash_across_dp_replicas_interval
        self._twice = options.verify_micro_batch_interval

    @contextmanager
    def during(self, iteration: int, judge: Judge) -> Iterator[Judge]:
        """Check a step within this context; yields a judge that raises DeviceFault, before an update, or judges."""
        chunks, optimizer = self._run.engine.model_chunks, self._run.engine.optimizer
        twice = computed_twice(chunks) if _due(iteration, self._twice) else nullcontext(lambda: None)
        with twice as difference:

            def checked(loss: float, norm: float | None) -> str | None:
                if (found := difference()) is not None:
                    self._end(iteration, found, f"computed {found.what} twice with different results")
                if _due(iteration, self._copies) and (found := differing_copies(chunks, optimizer)) is not None:
                    one = len(found.ranks) == 1
                    self._end(iteration, found, f"{'differs from the others' if one else 'differ'} in {found.what}")
                return judge(loss, norm)

            yield checked

    def _end(self, iteration: int, found: Difference, what: str) -> None:
        """Report the ranks and their machines, and raise DeviceFault; every rank calls it."""
        hosts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(hosts, os.environ.get("SLURMD_NODENAME") or socket.gethostname())
        names = [str(rank) for rank in found.ranks]
        ranks = f"rank {names[0]}" if len(names) == 1 else f"ranks {', '.join(names[:-1])} and {names[-1]}"
        machines = sorted({hosts[rank] for rank in found.ranks})
        line = f"{ranks} {what} (on {', '.join(machines)})"
        self._report("mismatch", iteration, line, culprits=list(found.ranks), module=found.what, hosts=machines)
        raise DeviceFault(
            f"iteration {iteration}: {line}: a device computes or stores wrongly; replace the machine, and go on from "
            "a checkpoint"
        )


def _due(iteration: int, interval: int) -> bool:
    return interval > 0 and iteration % interval == 0
