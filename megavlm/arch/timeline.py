"""When each pass of a pipeline step runs: plays an order through with the time that every pass and transfer takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from megavlm.arch.schedules import BACKWARD, FORWARD, WEIGHT, Pass, PipelineShape, rank_schedules

Array = np.ndarray[Any, Any]
_KINDS = (FORWARD, BACKWARD, WEIGHT)

Times = Array  # [chunks, micro-batches] seconds; of several steps, which replicas end together, [… steps, replicas]


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
        """Return the seconds of all passes in a row: by kind, chunk and micro-batch, as `_number` counts them. Of
        several steps and replicas, the last two axes stay.
        """
        kinds = (self.forward, self.backward, *(() if self.weight is None else (self.weight,)))
        return np.concatenate([each.reshape(-1, *each.shape[2:]) for each in kinds])


@dataclass(frozen=True)
class Event:
    rank: int
    step: Pass
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """A step played through: seconds from its first pass to its last, and what ranks do meanwhile.

    Of several steps, the seconds of the slowest replica of each, in the mean, and what a rank does in the mean.
    """

    seconds: float
    busy: tuple[float, ...]  # of each rank
    events: tuple[Event, ...]  # by rank, in order; empty unless asked for

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
    if lengths.ndim > 1:
        return _steps(program, shape, lengths, hops, keep_events=keep_events)
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


def _steps(
    program: _Program,
    shape: PipelineShape,
    lengths: Array,
    hops: Array,
    *,
    keep_events: bool,
) -> Timeline:
    """Play several steps at once, each on several replicas, of passes that take `lengths` [passes, steps, replicas].

    Events are those of the slowest replica in the step that is nearest to the mean one.
    """
    ends = np.zeros((len(lengths) + 1, *lengths.shape[1:]))
    order = zip(program.waits_for.tolist(), hops.tolist(), program.after.tolist(), strict=True)
    for place, (waits_for, hop, after) in enumerate(order):
        np.maximum(ends[waits_for] + hop, ends[after], out=ends[place + 1])
        ends[place + 1] += lengths[place]
    seconds = ends.max(axis=0)  # [steps, replicas]
    slowest = seconds.max(axis=1)
    busy = np.bincount(program.rank, lengths.mean(axis=(1, 2)), minlength=shape.pp)
    step = int(np.abs(slowest - slowest.mean()).argmin())
    shown = ends[:, step, seconds[step].argmax()].tolist()
    events = _events(program, shape, hops, shown) if keep_events else ()
    return Timeline(float(slowest.mean()), tuple(busy.tolist()), events)


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
