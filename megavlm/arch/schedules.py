"""Orders of passes on pipeline ranks (GPipe, 1F1B, interleaved 1F1B, ZB-H1), and the simulation of their times.

An order is fixed before the step begins. `simulate` computes when each pass runs from the seconds of all passes and
transfers.

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
    """One micro-batch through one chunk: F forward, B backward, W weight gradients. Where W exists, B computes the
    gradient of the input alone.
    """

    kind: str
    chunk: int
    micro: int


@dataclass(frozen=True)
class PipelineShape:
    """Input of a schedule: `pp` ranks with `vpp` chunks each, and `micro_batches` per step."""

    schedule: ScheduleName
    pp: int
    vpp: int
    micro_batches: int

    @property
    def chunks(self) -> int:
        """Return the number of chunks of the whole pipeline."""
        return self.pp * self.vpp

    @property
    def splits_backward(self) -> bool:
        """Return whether the schedule has separate passes for weight gradients."""
        return self.schedule == "zb-h1"


def shape_of(dims: Dims, micro_batches: int) -> PipelineShape:
    """Return the shape of the pipeline with these degrees."""
    return PipelineShape(dims.order, dims.pp, dims.vpp, micro_batches)


def scenario_shape(scenario: Scenario) -> PipelineShape:
    """Return the shape of the pipeline of a scenario."""
    return shape_of(scenario.dims, scenario.micro_batches)


@lru_cache(maxsize=256)
def rank_schedules(shape: PipelineShape) -> tuple[tuple[Pass, ...], ...]:
    """Return the passes of each rank in the order in which it runs them."""
    if shape.schedule == "interleaved":
        assert shape.micro_batches % shape.pp == 0, "interleaving runs micro-batches in rounds of PP"
        return tuple(_interleaved(shape, rank) for rank in range(shape.pp))
    assert shape.vpp == 1, f"{shape.schedule} has one chunk per rank"
    if shape.schedule == "zb-h1":
        return tuple(_zero_bubble(shape.micro_batches, rank, shape.pp) for rank in range(shape.pp))
    warmups = [shape.micro_batches if shape.schedule == "gpipe" else shape.pp - rank - 1 for rank in range(shape.pp)]
    return tuple(_one_f_one_b(shape.micro_batches, rank, min(shape.micro_batches, w)) for rank, w in enumerate(warmups))


def _one_f_one_b(count: int, rank: int, warmup: int) -> tuple[Pass, ...]:
    """Return `warmup` forward passes, then forward and backward passes in turn, then the remaining backward passes."""
    order = [Pass(FORWARD, rank, micro) for micro in range(warmup)]
    for micro in range(count - warmup):
        order += [Pass(FORWARD, rank, warmup + micro), Pass(BACKWARD, rank, micro)]
    return (*order, *(Pass(BACKWARD, rank, micro) for micro in range(count - warmup, count)))


def _interleaved(shape: PipelineShape, rank: int) -> tuple[Pass, ...]:
    """Return the passes of a rank whose chunks take rounds of PP micro-batches in turn, backward in reverse order."""
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
    """Return ZB-H1: 1F1B with weight gradients delayed by `rank` micro-batches, to fill the bubble at the step's end.

    Between F and W a rank holds (PP − rank) + rank micro-batches: as many as 1F1B's first rank, on every rank.
    """
    order: list[Pass] = []
    for step in _one_f_one_b(count, rank, min(count, pp - rank - 1)):
        order.append(step)
        if step.kind == BACKWARD and step.micro >= rank:
            order.append(Pass(WEIGHT, rank, step.micro - rank))
    return (*order, *(Pass(WEIGHT, rank, micro) for micro in range(max(0, count - rank), count)))


_ROUNDS = 4  # of PP micro-batches: more do not raise the peak, as forward and backward passes then alternate


@lru_cache(maxsize=1024)
def peak_in_flight(shape: PipelineShape) -> tuple[tuple[int, ...], ...]:
    """Return for each rank the largest number of micro-batches that each of its chunks holds for a backward pass.

    For a rank with several chunks, the counts are taken at the moment when their sum is largest.
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
    """Return for each chunk of each rank how many micro-batches it holds at its peaks of memory.

    A peak is a pair: micro-batches held for a backward pass, and for weight gradients alone. Pairs that another one
    exceeds in both are left out.

    Which pair takes the most memory depends on what a micro-batch saves for either.
    """
    if not shape.splits_backward:
        return tuple(tuple(((count, 0),) for count in rank) for rank in peak_in_flight(shape))
    return tuple((_peaks(order, splits=rank > 0),) for rank, order in enumerate(rank_schedules(shape)))


def _peaks(order: Sequence[Pass], *, splits: bool) -> Held:
    """Return the pairs of `held_at_peaks` for one rank; `splits`: weight gradients are delayed (all ranks but the
    first).
    """
    whole = halves = 0
    counts = set()
    for step in order:
        whole += step.kind == FORWARD
        counts.add((whole, halves))
        whole -= step.kind == BACKWARD
        halves += splits * ((step.kind == BACKWARD) - (step.kind == WEIGHT))
        counts.add((whole, halves))
    exceeded = {(a, b) for a, b in counts for c, d in counts if (a, b) != (c, d) and a <= c and b <= d}
    return tuple(sorted(counts - exceeded))


Array = np.ndarray[Any, Any]
_KINDS = (FORWARD, BACKWARD, WEIGHT)

Times = Array  # [chunks, micro-batches] seconds


@dataclass(frozen=True)
class Durations:
    """Seconds of each chunk's passes (`Times`), and of the transfer between chunks c and c+1.

    Only schedules with separate passes for weight gradients read `weight`; their `backward` is the time of the input's
    gradient alone.
    """

    forward: Times
    backward: Times
    weight: Times | None = None
    transfer: Sequence[float] = ()  # [chunks − 1]; empty: nothing takes time

    def flat(self) -> Array:
        """Return the seconds of all passes in one row, by kind, chunk and micro-batch, in the order of `_number`."""
        kinds = (self.forward, self.backward, *(() if self.weight is None else (self.weight,)))
        return np.concatenate([seconds.ravel() for seconds in kinds])


@dataclass(frozen=True)
class Event:
    """A pass with its start and end in seconds."""

    rank: int
    step: Pass
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """Result of a simulated step: its seconds from the first pass to the last, and the busy seconds of each rank."""

    seconds: float
    busy: tuple[float, ...]  # of each rank
    events: tuple[Event, ...]  # by rank, in order; empty unless they are kept

    @property
    def bubble(self) -> float:
        """Return the idle share of the ranks' time, 0 to 1."""
        return 1 - sum(self.busy) / (len(self.busy) * self.seconds) if self.seconds else 0.0


def uniform(
    forward: Sequence[float],
    backward: Sequence[float],
    *,
    micro_batches: int,
    weight: Sequence[float] | None = None,
    transfer: Sequence[float] = (),
) -> Durations:
    """Return the durations of equal micro-batches, from the seconds of one micro-batch for each chunk."""

    def spread(values: Sequence[float]) -> Times:
        return np.repeat(np.array(values, dtype=float)[:, None], micro_batches, axis=1)

    return Durations(spread(forward), spread(backward), None if weight is None else spread(weight), transfer)


def simulate(shape: PipelineShape, durations: Durations, *, keep_events: bool = False) -> Timeline:
    """Simulate a step in which each pass starts as soon as its rank is free and its input has arrived.

    F of chunk c waits for F of c−1 and its transfer, B for its own F and for B of c+1 and its transfer. Sending takes
    none of the sender's time: transfers overlap with computation, as megatron-core's do on a GPU.
    """
    assert durations.weight is not None or not shape.splits_backward, "weight gradients run apart: give their times"
    program = _program(shape)
    lengths = durations.flat()[program.number]
    hops = np.array([*(durations.transfer or [0.0] * (shape.chunks - 1)), 0.0])[program.hop]
    ends = [0.0]
    # Plain numbers in one loop: a search simulates thousands of steps with thousands of passes each.
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
    """All ranks' passes in one list, each after those that it depends on. The list does not depend on durations.

    `waits_for` and `after` are places in the list, counted from 1; 0: none.
    """

    rank: Array
    number: Array  # of the pass: `_number`
    waits_for: Array  # the pass of the neighbouring chunk
    hop: Array  # the transfer from there; −1: none
    after: Array  # the pass before it on its rank


@lru_cache(maxsize=256)  # as many as `rank_schedules`
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
    """Return the passes with their times, ordered by rank and start."""
    finished = np.array(ends)
    starts = np.maximum(finished[program.waits_for] + hops, finished[program.after])
    kinds, chunks, micros = np.unravel_index(program.number, (len(_KINDS), shape.chunks, shape.micro_batches))
    columns = (program.rank, kinds, chunks, micros, starts, finished[1:])
    events = [
        Event(rank, Pass(_KINDS[kind], chunk, micro), start, end)
        for rank, kind, chunk, micro, start, end in zip(*(column.tolist() for column in columns), strict=True)
    ]
    return tuple(sorted(events, key=lambda event: (event.rank, event.start)))
