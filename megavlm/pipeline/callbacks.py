"""What passes call in a step: timers, and the finalisation of gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from megavlm.arch.dims import Dims
from megavlm.arch.schedules import Pass
from megavlm.parallel.groups import Groups
from megavlm.pipeline.colocated import ColocatedEncoder
from megavlm.resilience.phases import COMMUNICATION, COMPUTE, PIPELINE, Phases

_COMPUTE = {"forward-compute": "forward", "backward-compute": "backward", "weight-compute": "weights"}


class StepTimers:
    """megatron-core's timers: `timers("forward-compute").start()` begins a phase, `.stop()` ends it.

    Timers do not say which chunk runs: the walker does. Between two passes a pipeline stage waits for its neighbours;
    what is neither a forward nor a backward pass keeps megatron-core's name in a trace.
    """

    def __init__(self, dims: Dims, *, phases: Phases) -> None:
        self.traced = False  # whether phases are labelled in a trace
        self.running = Pass("", 0, 0)
        self._phases = phases
        self._between = PIPELINE if dims.pp > 1 else COMPUTE
        self._open: dict[str, Any] = {}

    def __call__(self, name: str, log_level: int | None = None) -> _Timer:
        return _Timer(self, name)

    def begin(self, name: str) -> None:
        """Begin a phase."""
        label = name
        if name in _COMPUTE:
            label = f"{_COMPUTE[name]} of chunk {self.running.chunk}, micro-batch {self.running.micro}"
            self._phases.enter(COMPUTE, label)
        if self.traced:
            self._open[name] = torch.profiler.record_function(label)
            self._open[name].__enter__()

    def end(self, name: str) -> None:
        """End it."""
        if name in _COMPUTE:
            self._phases.enter(self._between)
        if name in self._open:
            self._open.pop(name).__exit__(None, None, None)


@dataclass(frozen=True)
class _Timer:
    """megatron-core's view of one timer."""

    timers: StepTimers
    name: str

    def start(self, barrier: bool = False) -> None:
        self.timers.begin(self.name)

    def stop(self, barrier: bool = False) -> None:
        self.timers.end(self.name)


def finalize_gradients(
    chunks: list[Any],
    num_tokens: Tensor | None = None,
    pg_collection: ProcessGroupCollection | None = None,
    force_all_reduce: bool = False,
    *,
    groups: Groups,
    colocated: ColocatedEncoder | None = None,
    phases: Phases,
) -> None:
    """Finish the gradients after the last backward pass: reduce them over DP and TP, add up tied copies, then run a
    colocated encoder's backward pass. The schedule calls it.

    megatron-core would divide gradients by `num_tokens`, which the last stage alone counts, and let the host wait for
    it. Here they stay sums, and the update divides (`optim/chained.py`).
    """
    phases.enter(COMMUNICATION, "gradients")
    finalize_model_grads(chunks, None, pg_collection=pg_collection, force_all_reduce=force_all_reduce)
    sum_tied_gradients(chunks, groups)
    if colocated is not None:
        phases.enter(COMPUTE, "backward of the encoder")
        colocated.finish()


def sum_tied_gradients(chunks: Sequence[Any], groups: Groups) -> None:
    """Set `main_grad` of both copies of tied embeddings to the sum of both gradients, so that the copies stay equal.

    megatron-core synchronises copies on the first and last pipeline stage. Here the first language stage may be any
    stage, or another chunk of the last rank, so the copies have a group of their own.

    With the distributed optimizer only a rank's own shard of `main_grad` is reduced over data-parallel ranks at
    this point. megatron-core gives shared embeddings a bucket of their own, so copies are sharded alike and the sum
    of equal shards is right.
    """
    copies: list[Tensor] = [
        param.main_grad
        for chunk in chunks
        for param in chunk.parameters()
        if getattr(param, "shared_embedding", False) and param.requires_grad
    ]
    if not copies:
        return
    total = copies[0]
    for other in copies[1:]:
        total += other
    if groups.tied is not None:
        dist.all_reduce(total, group=groups.tied)
    for other in copies[1:]:
        other.copy_(total)
