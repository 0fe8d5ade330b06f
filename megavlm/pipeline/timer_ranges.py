"""A step's phases in a trace: megatron-core's timers as ranges whose names say which chunk and micro-batch.

megatron-core starts and stops a timer around each phase if its config has any (`config.timers`). While a step is
traced, `TimerRanges` stands there; at other times nothing does, and nothing is paid.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from megavlm.parallel.dims import Dims
from megavlm.planner.schedules import BACKWARD, FORWARD, rank_schedules, shape_of

_COMPUTE = {"forward-compute": (FORWARD, "forward"), "backward-compute": (BACKWARD, "backward")}


class TimerRanges:
    """The phases of one step: `phases("forward-compute").start()` opens a range, `.stop()` closes it.

    Timers do not say which chunk runs, but the order is fixed before the step begins (`planner/schedules.py`). What is
    neither a forward nor a backward pass keeps megatron-core's name.
    """

    def __init__(self, dims: Dims, *, rank: int, micro_batches: int) -> None:
        """`rank` is the pipeline rank."""
        order = rank_schedules(shape_of(dims, micro_batches))[rank]
        self._passes = {
            name: [f"{word} of chunk {each.chunk}, micro-batch {each.micro}" for each in order if each.kind == kind]
            for name, (kind, word) in _COMPUTE.items()
        }
        self._open: dict[str, Any] = {}

    def __call__(self, name: str, log_level: int | None = None) -> _Phase:
        return _Phase(self, name)

    def begin(self, name: str) -> None:
        """Open the range of a phase."""
        self._open[name] = torch.profiler.record_function(self._passes[name].pop(0) if name in _COMPUTE else name)
        self._open[name].__enter__()

    def end(self, name: str) -> None:
        """Close it."""
        self._open.pop(name).__exit__(None, None, None)


@dataclass(frozen=True)
class _Phase:
    """megatron-core's view of one timer."""

    phases: TimerRanges
    name: str

    def start(self, barrier: bool = False) -> None:
        self.phases.begin(self.name)

    def stop(self, barrier: bool = False) -> None:
        self.phases.end(self.name)
