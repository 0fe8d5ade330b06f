"""Order the passes of each pipeline rank (GPipe, 1F1B, interleaved 1F1B, zero-bubble ZB-H1), and simulate their times.

An order is fixed before the step begins and says nothing about time; `simulate` plays it through with the time that
every pass and transfer takes.
Sources: GPipe (Huang et al. 2019); 1F1B (Narayanan et al. 2019, PipeDream-Flush); interleaved 1F1B (Narayanan et al.
2021) in megatron-core's order; ZB-H1 (Qi et al. 2023, "Zero Bubble Pipeline Parallelism").
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

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


Array = np.ndarray[Any, Any]
_KINDS = (FORWARD, BACKWARD, WEIGHT)

Times = Array  # [chunks, micro-batches] seconds


@dataclass(frozen=True)
class Durations:
    """Seconds of each chunk's passes (`Times`), and of what travels between chunk c and c+1.

    `weight` is only read by schedules that run weight gradients apart; their `backward` is the input's half.
    """

    forward: Times
    backward: Times
    weight: Times | None = None
    transfer: Sequence[float] = ()  # [chunks − 1]; empty: nothing takes time

    def flat(self) -> Array:
        """Return the seconds of all passes in a row: by kind, chunk and micro-batch, as `_number` counts them."""
        kinds = (self.forward, self.backward, *(() if self.weight is None else (self.weight,)))
        return np.concatenate([each.ravel() for each in kinds])


@dataclass(frozen=True)
class Event:
    rank: int
    step: Pass
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """A step played through: seconds from its first pass to its last, and what ranks do meanwhile."""

    seconds: float
    busy: tuple[float, ...]  # of each rank
    events: tuple[Event, ...]  # by rank, in order; empty unless they are kept

    @property
    def bubble(self) -> float:
        """Share of the ranks' time in which they compute nothing, 0 to 1."""
        return 1 - sum(self.busy) / (len(self.busy) * self.seconds) if self.seconds else 0.0


def uniform(
    forward: Sequence[float],
    backward: Sequence[float],
    *,
    micro_batches: int,
    weight: Sequence[float] | None = None,
    transfer: Sequence[float] = (),
) -> Durations:
    """Durations of micro-batches that are all alike, from one number per chunk."""

    def spread(values: Sequence[float]) -> Times:
        return np.repeat(np.array(values, dtype=float)[:, None], micro_batches, axis=1)

    return Durations(spread(forward), spread(backward), None if weight is None else spread(weight), transfer)


def simulate(shape: PipelineShape, durations: Durations, *, keep_events: bool = False) -> Timeline:
    """Run every rank's order: a pass starts when its rank is free and its input is there.

    F of chunk c waits for F of c−1 and its transfer, B for its own F and for B of c+1 and its transfer. Sending takes
    none of the sender's time: transfers run beside computation, as megatron-core's do on a GPU.
    """
    assert durations.weight is not None or not shape.splits_backward, "weight gradients run apart: give their times"
    program = _program(shape)
    lengths = durations.flat()[program.number]
    hops = np.array([*(durations.transfer or [0.0] * (shape.chunks - 1)), 0.0])[program.hop]
    ends = [0.0]
    # Plain numbers in one loop: a search plays thousands of steps of thousands of passes each.
    for waits_for, hop, after, length in zip(
        program.waits_for.tolist(), hops.tolist(), program.after.tolist(), lengths.tolist(), strict=True
    ):
        ready, free = ends[waits_for] + hop, ends[after]
        ends.append((ready if ready > free else free) + length)
    busy = np.bincount(program.rank, lengths, minlength=shape.pp)
    events = _events(program, shape, hops, ends) if keep_events else ()
    return Timeline(max(ends), tuple(busy.tolist()), events)


@dataclass(frozen=True)
class _Program:
    """All ranks' passes in one list, each after those that it waits for: the same whatever passes take.

    `waits_for` and `after` are places in the list, counted from 1; 0: none.
    """

    rank: Array
    number: Array  # of the pass: `_number`
    waits_for: Array  # the pass of the neighbouring chunk
    hop: Array  # the transfer from there; −1: none
    after: Array  # the pass before it on its rank


@lru_cache(maxsize=64)
def _program(shape: PipelineShape) -> _Program:
    order, last = rank_schedules(shape), shape.chunks - 1
    place: dict[int, int] = {}  # by the pass's number
    rows: list[tuple[int, int, int, int, int]] = []
    done, latest = [0] * shape.pp, [0] * shape.pp
    waiting = set(range(shape.pp))
    while waiting:
        before = len(rows)
        for rank in sorted(waiting):
            for step in order[rank][done[rank] :]:
                needed, hop = 0, -1
                if step.kind == FORWARD and step.chunk:
                    needed, hop = place.get(_number(shape, step.kind, step.chunk - 1, step.micro), -1), step.chunk - 1
                elif step.kind == BACKWARD and step.chunk < last:
                    needed, hop = place.get(_number(shape, step.kind, step.chunk + 1, step.micro), -1), step.chunk
                if needed < 0:
                    break
                number = _number(shape, step.kind, step.chunk, step.micro)
                rows.append((rank, number, needed, hop, latest[rank]))
                place[number] = latest[rank] = len(rows)
                done[rank] += 1
            if done[rank] == len(order[rank]):
                waiting.discard(rank)
        assert len(rows) > before, "the schedule's orders wait for one another"
    return _Program(*np.array(rows, dtype=np.int32).T)


def _number(shape: PipelineShape, kind: str, chunk: int, micro: int) -> int:
    return (_KINDS.index(kind) * shape.chunks + chunk) * shape.micro_batches + micro


def _events(program: _Program, shape: PipelineShape, hops: Array, ends: Sequence[float]) -> tuple[Event, ...]:
    """Return the passes with their times, by rank and in order."""
    finished = np.array(ends)
    starts = np.maximum(finished[program.waits_for] + hops, finished[program.after])
    kinds, chunks, micros = np.unravel_index(program.number, (len(_KINDS), shape.chunks, shape.micro_batches))
    columns = (program.rank, kinds, chunks, micros, starts, finished[1:])
    events = [
        Event(rank, Pass(_KINDS[kind], chunk, micro), start, end)
        for rank, kind, chunk, micro, start, end in zip(*(column.tolist() for column in columns), strict=True)
    ]
    return tuple(sorted(events, key=lambda event: (event.rank, event.start)))
