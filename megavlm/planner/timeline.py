"""When each pass of a pipeline step runs: plays a schedule's order through with the time that every pass takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from megavlm.planner.orders import BACKWARD, FORWARD, KINDS, WEIGHT, ScheduleName, orders

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class ChunkTimes:
    """What one micro-batch costs in one chunk."""

    forward: float  # seconds
    backward: float  # seconds, gradients of input and weights together
    weight: float = 0.0  # seconds of `backward` that a zero-bubble schedule may postpone
    activation: float = 1.0  # memory held from the forward's start to the (last) backward's end, any unit
    send: float = 0.0  # seconds until the next chunk has this one's output, and this one its gradient


@dataclass(frozen=True)
class Event:
    rank: int
    chunk: int
    microbatch: int
    kind: str  # "forward", "backward" or "weight"
    start: float
    end: float


@dataclass(frozen=True)
class _Passes:
    """A schedule as arrays, passes sorted so that each comes after all that it waits for."""

    rank: Array
    chunk: Array
    microbatch: Array
    kind: Array
    before: Array  # the pass before it on its rank; the number of passes, if none
    source: Array  # the pass whose result it reads; the number of passes, if none
    sender: Array  # the chunk whose `send` that result takes; the number of chunks, if none
    waves: tuple[int, ...]  # where each group of passes that wait for none of one another ends
    by_rank: Array  # [pp, passes per rank]: each rank's passes in its order


@dataclass(frozen=True)
class Timeline:
    """One step played through."""

    step_time: float  # seconds from the first pass's start to the last one's end
    bubble: float  # share of pp × step_time in which ranks compute nothing
    peak_activation: tuple[float, ...]  # of each rank, in the unit of `ChunkTimes.activation`
    _passes: _Passes = field(repr=False)
    _starts: Array = field(repr=False)
    _ends: Array = field(repr=False)

    @cached_property
    def events(self) -> tuple[Event, ...]:
        """Every pass, rank by rank in the order that it ran."""
        at = self._passes.by_rank.ravel()
        columns = (self._passes.rank, self._passes.chunk, self._passes.microbatch)
        rows = zip(*(column[at].tolist() for column in columns), strict=True)
        kinds, starts, ends = self._passes.kind[at].tolist(), self._starts[at].tolist(), self._ends[at].tolist()
        return tuple(
            Event(rank, chunk, microbatch, KINDS[kind], start, end)
            for (rank, chunk, microbatch), kind, start, end in zip(rows, kinds, starts, ends, strict=True)
        )


def simulate(
    schedule: ScheduleName,
    chunks: Sequence[ChunkTimes],
    *,
    pp: int,
    microbatches: int,
    scales: Sequence[float] | Sequence[Sequence[float]] | None = None,
) -> Timeline:
    """Run every rank's order: a pass starts as soon as its rank is free and its input is there.

    Chunk c runs on rank c mod pp. A forward waits for the chunk before and its `send`, a backward for the chunk after
    and as long a way back. Sending takes none of the sender's time: it runs beside computation. A backward waits for
    no gradient where neither its chunk nor an earlier one has anything to do in it (frozen parts that come first).
    `scales` multiplies times and memory of unlike micro-batches: [microbatches], or [chunks][microbatches].
    """
    vpp, rest = divmod(len(chunks), pp)
    assert vpp >= 1, f"{pp} ranks need a chunk each"
    assert rest == 0, f"{len(chunks)} chunks do not spread over {pp} ranks"
    idle = next((i for i, chunk in enumerate(chunks) if chunk.backward > 0), len(chunks))
    passes = _passes(schedule, pp, vpp, microbatches, idle)
    costs = np.array([(c.forward, c.backward, c.weight, c.activation) for c in chunks], dtype=float)
    assert (costs[:, WEIGHT] <= costs[:, BACKWARD]).all(), "`weight` is a part of `backward`"
    if schedule == "zb-h1":
        costs[:, BACKWARD] -= costs[:, WEIGHT]
    lengths, held = costs[passes.chunk, passes.kind], costs[passes.chunk, 3]
    if scales is not None:
        factors = np.broadcast_to(np.asarray(scales, dtype=float), (len(chunks), microbatches))
        factor = factors[passes.chunk, passes.microbatch]
        lengths, held = lengths * factor, held * factor
    sends = np.array([chunk.send if pp > 1 else 0.0 for chunk in chunks] + [0.0])[passes.sender]

    count = len(lengths)
    starts, ends = np.zeros(count), np.zeros(count + 1)  # the last end stands for "waits for nothing"
    first = 0
    for last in passes.waves:
        wave = slice(first, last)
        starts[wave] = np.maximum(ends[passes.before[wave]], ends[passes.source[wave]] + sends[wave])
        ends[wave] = starts[wave] + lengths[wave]
        first = last
    step_time = float(ends.max())
    busy = float(lengths.sum())
    release = WEIGHT if schedule == "zb-h1" else BACKWARD
    changes = held * (passes.kind == FORWARD) - held * (passes.kind == release)
    peaks = np.cumsum(changes[passes.by_rank], axis=1).max(axis=1)
    return Timeline(
        step_time=step_time,
        bubble=max(0.0, 1 - busy / (pp * step_time)) if step_time > 0 else 0.0,
        peak_activation=tuple(map(float, peaks)),
        _passes=passes,
        _starts=starts,
        _ends=ends[:-1],
    )


@lru_cache(maxsize=64)
def _passes(schedule: ScheduleName, pp: int, vpp: int, microbatches: int, idle: int) -> _Passes:
    """Lay the orders out as arrays; backwards of the first `idle` chunks wait for no gradient.

    A pass's wave is the longest way of waiting that leads to it, so passes of one wave can be computed at once.
    """
    order = orders(schedule, pp=pp, vpp=vpp, microbatches=microbatches)
    length, chunks = len(order[0]), pp * vpp
    table = np.array(order, dtype=np.int64).reshape(pp * length, 3)
    place = np.full((3, chunks + 2, microbatches), -1, dtype=np.int64)  # of each pass; chunks −1 and `chunks` are none
    place[table[:, 0], table[:, 1] + 1, table[:, 2]] = np.arange(pp * length)
    kind, chunk, micro = table.T
    grads = np.where(chunk < idle, -1, place[BACKWARD, chunk + 2, micro])
    source = np.where(kind == FORWARD, place[FORWARD, chunk, micro], np.where(kind == BACKWARD, grads, -1))
    sender = np.where(source < 0, chunks, np.where(kind == FORWARD, chunk - 1, chunk))
    wave = _waves(source.tolist(), pp, length)
    by_wave = np.argsort(wave, kind="stable")
    new = np.append(np.argsort(by_wave, kind="stable"), pp * length)  # where each pass went; none stays the last
    before = np.arange(pp * length) - 1
    before[::length] = -1
    return _Passes(
        rank=by_wave // length,
        chunk=chunk[by_wave],
        microbatch=micro[by_wave],
        kind=kind[by_wave],
        before=new[before[by_wave]],
        source=new[source[by_wave]],
        sender=sender[by_wave],
        waves=tuple(np.cumsum(np.bincount(wave)).tolist()),
        by_rank=new[:-1].reshape(pp, length),
    )


def _waves(source: list[int], pp: int, length: int) -> Array:
    """Of each pass (rank by rank): one more than that of the pass before it and of the one whose result it reads."""
    wave = [-1] * (pp * length)
    at = [rank * length for rank in range(pp)]
    clock = [-1] * pp
    moved = True
    while moved:
        moved = False
        for rank in range(pp):
            place, end, now = at[rank], (rank + 1) * length, clock[rank]
            while place < end:
                needed = source[place]
                if needed >= 0:
                    if wave[needed] < 0:
                        break
                    now = max(now, wave[needed])
                now += 1
                wave[place] = now
                place += 1
            moved = moved or place > at[rank]
            at[rank], clock[rank] = place, now
    assert min(wave) >= 0, "the schedule's orders wait for one another"
    return np.array(wave)
