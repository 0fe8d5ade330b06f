"""What each rank of a pipeline does in a step: its passes in a schedule's order, and the receives between them.

Ranks that send to each other in both directions wait for each other forever if both begin with what the other does
second: NCCL runs the transfers of a pair of ranks one after the other. So all transfers of a step have one order, which
the two ends of each follow: that of the passes that make what is sent, as they begin in a simulated step. No rank waits
for a transfer before it has begun all earlier ones of its own, so that the first transfer that is not done can always
be done.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from megavlm.arch.schedules import BACKWARD, FORWARD, Pass, PipelineShape
from megavlm.arch.timeline import simulate, uniform


@dataclass(frozen=True)
class Receive:
    """Begin to receive what a pass on another rank makes."""

    made_by: Pass


_ONWARD = {FORWARD: 1, BACKWARD: -1}  # hidden states go to the next chunk, gradients to the previous one


def receiver(made_by: Pass, shape: PipelineShape) -> Pass | None:
    """Return the pass of another chunk that needs what this one makes, if any does."""
    return _neighbour(made_by, _ONWARD.get(made_by.kind, 0), shape)


def maker(needed_by: Pass, shape: PipelineShape) -> Pass | None:
    """Return the pass of another chunk that makes what this one needs, if any does."""
    return _neighbour(needed_by, -_ONWARD.get(needed_by.kind, 0), shape)


def _neighbour(of: Pass, way: int, shape: PipelineShape) -> Pass | None:
    return Pass(of.kind, of.chunk + way, of.micro) if way and 0 <= of.chunk + way < shape.chunks else None


@lru_cache(maxsize=64)
def rank_program(shape: PipelineShape, rank: int) -> tuple[Pass | Receive, ...]:
    """Return a rank's passes in their order, and between them the beginnings of its receives.

    All passes are taken to last equally long, but whole backward passes twice as long. A pass begins after those that
    it depends on, so the passes of all ranks, sorted by their beginnings, are in an order that all ranks can follow.
    """
    each, whole = [1.0] * shape.chunks, [1.0 if shape.splits_backward else 2.0] * shape.chunks
    durations = uniform(each, whole, micro_batches=shape.micro_batches, weight=each)
    events = simulate(shape, durations, keep_events=True).events
    program: list[Pass | Receive] = []
    for event in sorted(events, key=lambda event: (event.start, event.rank)):
        to = receiver(event.step, shape)
        if event.rank == rank:
            program.append(event.step)
        elif to is not None and to.chunk % shape.pp == rank:
            program.append(Receive(event.step))
    return tuple(program)
