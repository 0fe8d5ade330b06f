"""The phases of a step, through the timers that megatron-core starts and stops around each (`config.timers`).

`StepTimers` stands there in every training step. It tells `Phases` which pass runs, for the watchdog and for the
seconds of each phase; while a step is traced it also labels the phases in the trace.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from megavlm.arch.dims import Dims
from megavlm.arch.schedules import BACKWARD, FORWARD, WEIGHT, rank_schedules, shape_of
from megavlm.resilience.phases import COMPUTE, PIPELINE, Phases

_COMPUTE = {
    "forward-compute": (FORWARD, "forward"),
    "backward-compute": (BACKWARD, "backward"),
    "weight-compute": (WEIGHT, "weights"),
}


class StepTimers:
    """megatron-core's timers: `timers("forward-compute").start()` begins a phase, `.stop()` ends it.

    Timers do not say which chunk runs, but the order is fixed before the step begins (`arch/schedules.py`). Between
    two passes a pipeline stage waits for its neighbours; what is neither a forward nor a backward pass keeps
    megatron-core's name in a trace.
    """

    def __init__(self, dims: Dims, *, rank: int, phases: Phases) -> None:
        """`rank` is the pipeline rank."""
        self.traced = False  # whether phases are labelled in a trace
        self._dims = dims
        self._rank = rank
        self._phases = phases
        self._between = PIPELINE if dims.pp > 1 else COMPUTE
        self._passes: dict[str, Iterator[str]] = {}
        self._open: dict[str, Any] = {}

    def begin_step(self, micro_batches: int) -> None:
        """Expect the passes of a training step."""
        order = rank_schedules(shape_of(self._dims, micro_batches))[self._rank]
        self._passes = {
            name: iter(
                [f"{word} of chunk {each.chunk}, micro-batch {each.micro}" for each in order if each.kind == kind]
            )
            for name, (kind, word) in _COMPUTE.items()
        }

    def __call__(self, name: str, log_level: int | None = None) -> _Timer:
        return _Timer(self, name)

    def begin(self, name: str) -> None:
        """Begin a phase."""
        label = name
        if name in _COMPUTE:
            label = next(self._passes[name])
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
