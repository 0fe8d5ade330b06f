"""In which order each pipeline rank runs its passes: GPipe, 1F1B, interleaved 1F1B and zero-bubble ZB-H1.

An order is fixed before the step begins and says nothing about time; `timeline` says when each pass then runs.
Sources: GPipe (Huang et al. 2019); 1F1B (Narayanan et al. 2019, PipeDream-Flush); interleaved 1F1B (Narayanan et al.
2021) in megatron-core's order; ZB-H1 (Qi et al. 2023, "Zero Bubble Pipeline Parallelism").
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from megavlm.arch.dims import Dims, ScheduleName
from megavlm.arch.scenario import Scenario

FORWARD, BACKWARD, WEIGHT = "F", "B", "W"


@dataclass(frozen=True)
class Pass:
    """One micro-batch through one chunk: F forward, B backward (its input's half where W is apart), W weights' half."""

    kind: str
    chunk: int
    micro: int


@dataclass(frozen=True)
class PipelineShape:
    """What an order depends on: `pp` ranks with `vpp` chunks each, and micro-batches per step."""

    schedule: ScheduleName
    pp: int
    vpp: int
    micro_batches: int

    @property
    def chunks(self) -> int:
        return self.pp * self.vpp

    @property
    def splits_backward(self) -> bool:
        """Return whether gradients of weights have passes of their own."""
        return self.schedule == "zb-h1"


def shape_of(dims: Dims, micro_batches: int) -> PipelineShape:
    """Return the shape of the pipeline that runs for these degrees."""
    return PipelineShape(dims.order, dims.pp, dims.vpp, micro_batches)


def scenario_shape(scenario: Scenario) -> PipelineShape:
    """Return the shape of a scenario's pipeline."""
    return shape_of(scenario.dims, scenario.micro_batches)


@lru_cache(maxsize=256)
def rank_schedules(shape: PipelineShape) -> tuple[tuple[Pass, ...], ...]:
    """Return each rank's passes in the order that it runs them."""
    if shape.schedule == "interleaved":
        assert shape.micro_batches % shape.pp == 0, "interleaving runs micro-batches in rounds of PP"
        return tuple(_interleaved(shape, rank) for rank in range(shape.pp))
    assert shape.vpp == 1, f"{shape.schedule} has one chunk per rank"
    if shape.schedule == "zb-h1":
        return tuple(_zero_bubble(shape.micro_batches, rank, shape.pp) for rank in range(shape.pp))
    warmups = [shape.micro_batches if shape.schedule == "gpipe" else shape.pp - rank - 1 for rank in range(shape.pp)]
    return tuple(_one_f_one_b(shape.micro_batches, rank, min(shape.micro_batches, w)) for rank, w in enumerate(warmups))


def _one_f_one_b(count: int, rank: int, warmup: int) -> tuple[Pass, ...]:
    """`warmup` forwards, then a forward and a backward in turn while there are forwards, then the backwards left."""
    order = [Pass(FORWARD, rank, micro) for micro in range(warmup)]
    for micro in range(count - warmup):
        order += [Pass(FORWARD, rank, warmup + micro), Pass(BACKWARD, rank, micro)]
    return (*order, *(Pass(BACKWARD, rank, micro) for micro in range(count - warmup, count)))


def _interleaved(shape: PipelineShape, rank: int) -> tuple[Pass, ...]:
    """Rounds of PP micro-batches pass a rank's chunks in turn, backwards in the opposite order of chunks."""
    pp, vpp, count = shape.pp, shape.vpp, shape.micro_batches
    table = [(first + micro, chunk) for first in range(0, count, pp) for chunk in range(vpp) for micro in range(pp)]
    forwards = [Pass(FORWARD, chunk * pp + rank, micro) for micro, chunk in table]
    backwards = [Pass(BACKWARD, (vpp - 1 - chunk) * pp + rank, micro) for micro, chunk in table]
    warmup = min(len(table), (pp - rank - 1) * 2 + (vpp - 1) * pp)
    order = forwards[:warmup]
    for forward, backward in zip(forwards[warmup:], backwards, strict=False):
        order += [forward, backward]
    return (*order, *backwards[len(table) - warmup :])


def _zero_bubble(count: int, rank: int, pp: int) -> tuple[Pass, ...]:
    """ZB-H1: 1F1B whose weight gradients lag `rank` micro-batches behind, and so fill the end of the step.

    Between F and W a rank holds (PP − rank) + rank micro-batches: as many as 1F1B's first rank, on every rank.
    """
    order: list[Pass] = []
    for step in _one_f_one_b(count, rank, min(count, pp - rank - 1)):
        order.append(step)
        if step.kind == BACKWARD and step.micro >= rank:
            order.append(Pass(WEIGHT, rank, step.micro - rank))
    return (*order, *(Pass(WEIGHT, rank, micro) for micro in range(max(0, count - rank), count)))


_ROUNDS = 4  # of PP micro-batches, after which forwards and backwards take turns and nothing new is held


@lru_cache(maxsize=1024)
def peak_in_flight(shape: PipelineShape) -> tuple[tuple[int, ...], ...]:
    """Of each rank: the largest number of micro-batches with a backward pass to come that each of its chunks holds.

    Where a rank has several chunks, the counts are those at the moment when their sum is largest.
    """
    enough = _ROUNDS * shape.pp
    if shape.schedule in ("1f1b", "interleaved") and shape.micro_batches > enough:
        return peak_in_flight(replace(shape, micro_batches=enough))
    peaks = []
    for rank, order in enumerate(rank_schedules(shape)):
        held = dict.fromkeys(range(rank, shape.chunks, shape.pp), 0)
        peak, at_peak = -1, tuple(held.values())
        for step in order:
            held[step.chunk] += (step.kind == FORWARD) - (step.kind == BACKWARD)
            if sum(held.values()) > peak:
                peak, at_peak = sum(held.values()), tuple(held.values())
        peaks.append(at_peak)
    return tuple(peaks)


Held = tuple[tuple[int, int], ...]


@lru_cache(maxsize=1024)
def held_at_peaks(shape: PipelineShape) -> tuple[tuple[Held, ...], ...]:
    """Of each chunk of each rank: how many micro-batches with a backward pass to come, and how many with weight
    gradients alone to come, it holds at once; of all such pairs those that no other exceeds in both.

    Which takes the most memory depends on what a micro-batch keeps for either.
    """
    if not shape.splits_backward:
        return tuple(tuple(((count, 0),) for count in rank) for rank in peak_in_flight(shape))
    return tuple((_peaks(order, splits=rank > 0),) for rank, order in enumerate(rank_schedules(shape)))


def _peaks(order: Sequence[Pass], *, splits: bool) -> Held:
    """`splits`: whether gradients of weights wait; the first chunk's do not."""
    whole = halves = 0
    found = set()
    for step in order:
        whole += step.kind == FORWARD
        found.add((whole, halves))
        whole -= step.kind == BACKWARD
        halves += splits * ((step.kind == BACKWARD) - (step.kind == WEIGHT))
        found.add((whole, halves))
    exceeded = {(a, b) for a, b in found for c, d in found if (a, b) != (c, d) and a <= c and b <= d}
    return tuple(sorted(found - exceeded))
