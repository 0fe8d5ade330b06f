"""When each pass of a pipeline step runs: plays an order through with the time that every pass and transfer takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megavlm.planner.schedules import BACKWARD, FORWARD, Pass, PipelineShape, rank_schedules

Times = Sequence[Sequence[float]]  # [chunks][micro-batches], seconds


@dataclass(frozen=True)
class Durations:
    """Seconds of each chunk's passes, `[chunks][micro-batches]`, and of what travels between chunk c and c+1.

    `weight` is only read by schedules that run weight gradients apart; their `backward` is the input's half.
    """

    forward: Times
    backward: Times
    weight: Times | None = None
    transfer: Sequence[float] = ()  # [chunks − 1]; empty: nothing takes time

    def of(self, step: Pass) -> float:
        if step.kind == FORWARD:
            return self.forward[step.chunk][step.micro]
        if step.kind == BACKWARD:
            return self.backward[step.chunk][step.micro]
        assert self.weight is not None, "this schedule runs weight gradients apart: their times are needed"
        return self.weight[step.chunk][step.micro]


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

    def spread(values: Sequence[float]) -> list[list[float]]:
        return [[value] * micro_batches for value in values]

    return Durations(spread(forward), spread(backward), None if weight is None else spread(weight), transfer)


def simulate(shape: PipelineShape, durations: Durations, *, keep_events: bool = False) -> Timeline:
    """Run every rank's order: a pass starts when its rank is free and its input is there.

    F of chunk c waits for F of c−1 and its transfer, B for its own F and for B of c+1 and its transfer. Sending takes
    none of the sender's time: transfers run beside computation, as megatron-core's do on a GPU.
    """
    order = rank_schedules(shape)
    transfer = durations.transfer or [0.0] * (shape.chunks - 1)
    ends: dict[str, list[list[float]]] = {
        kind: [[-1.0] * shape.micro_batches for _ in range(shape.chunks)] for kind in (FORWARD, BACKWARD)
    }
    clocks, places, busy = [0.0] * shape.pp, [0] * shape.pp, [0.0] * shape.pp
    events: list[Event] = []
    waiting = set(range(shape.pp))
    last = shape.chunks - 1
    while waiting:
        progressed = False
        for rank in sorted(waiting):
            mine = order[rank]
            while places[rank] < len(mine):
                step = mine[places[rank]]
                ready = 0.0
                if step.kind == FORWARD and step.chunk:
                    ready = ends[FORWARD][step.chunk - 1][step.micro]
                    ready = ready if ready < 0 else ready + transfer[step.chunk - 1]
                elif step.kind == BACKWARD and step.chunk < last:
                    ready = ends[BACKWARD][step.chunk + 1][step.micro]
                    ready = ready if ready < 0 else ready + transfer[step.chunk]
                if ready < 0:
                    break
                start, length = max(clocks[rank], ready), durations.of(step)
                clocks[rank] = start + length
                busy[rank] += length
                if step.kind in ends:
                    ends[step.kind][step.chunk][step.micro] = clocks[rank]
                if keep_events:
                    events.append(Event(rank, step, start, clocks[rank]))
                places[rank] += 1
                progressed = True
            if places[rank] == len(mine):
                waiting.discard(rank)
        assert progressed, "the schedule's orders wait for one another"
    return Timeline(max(clocks), tuple(busy), tuple(sorted(events, key=lambda event: (event.rank, event.start))))
