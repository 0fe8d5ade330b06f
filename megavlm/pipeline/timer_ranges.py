"""Name the phases of a step in a profiler's trace by chunk and micro-batch.

megatron-core starts and stops a timer around each phase if its config has timers (`config.timers`). While a step is
traced, `TimerRanges` takes their place; at other times there are none, which costs nothing.
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

    megatron-core does not tell a timer which chunk runs, but the order is fixed (`planner/schedules.py`). Phases other
    than forward and backward passes keep megatron-core's names.
    """

    def __init__(self, dims: Dims, *, rank: int, micro_batches: int) -> None:
        """`rank` is the pipeline rank; `micro_batches` is their number in a step."""
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
        """Close the range of a phase."""
        self._open.pop(name).__exit__(None, None, None)


@dataclass(frozen=True)
class _Phase:
    """A timer with the interface that megatron-core calls."""

    phases: TimerRanges
    name: str

    def start(self, barrier: bool = False) -> None:
        self.phases.begin(self.name)

    def stop(self, barrier: bool = False) -> None:
        self.phases.end(self.name)
