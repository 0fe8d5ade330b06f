"""In which order each pipeline rank runs its passes: GPipe, 1F1B, interleaved 1F1B and zero-bubble ZB-H1.

An order is fixed before the step begins and knows no times; `timeline` says when each pass then runs.
Sources: GPipe (Huang et al. 2019); 1F1B (Narayanan et al. 2019, PipeDream-Flush); interleaved 1F1B (Narayanan et al.
2021), with megatron-core's warm-up and rounds; ZB-H1 (Qi et al. 2023, "Zero Bubble Pipeline Parallelism").
"""

from __future__ import annotations

from functools import lru_cache
from typing import Literal, NamedTuple

ScheduleName = Literal["gpipe", "1f1b", "interleaved", "zb-h1"]
FORWARD, BACKWARD, WEIGHT = 0, 1, 2
KINDS = ("forward", "backward", "weight")


class Pass(NamedTuple):
    """One micro-batch through one chunk. With WEIGHT passes apart, BACKWARD is the gradient of the input alone."""

    kind: int
    chunk: int
    microbatch: int


Order = list[Pass]


def schedule_for(*, pp: int, vpp: int) -> ScheduleName:
    """The schedule that megatron-core runs for these degrees."""
    return "interleaved" if vpp > 1 and pp > 1 else "1f1b"


@lru_cache(maxsize=64)
def orders(schedule: ScheduleName, *, pp: int, vpp: int, microbatches: int) -> list[Order]:
    """Each rank's passes in the order that it runs them; all ranks have equally many."""
    assert min(pp, vpp, microbatches) >= 1
    if schedule == "interleaved" and vpp > 1:
        assert microbatches % pp == 0, "interleaving runs micro-batches in rounds of PP"
        return [_interleaved(rank, pp, vpp, microbatches) for rank in range(pp)]
    assert vpp == 1, f"{schedule} has one chunk per rank"
    if schedule == "gpipe":
        return [_alternating(rank, microbatches, warmup=microbatches) for rank in range(pp)]
    one_f_one_b = [_alternating(rank, microbatches, warmup=pp - 1 - rank) for rank in range(pp)]
    if schedule == "zb-h1":
        return [_with_weights(rank, order, microbatches) for rank, order in enumerate(one_f_one_b)]
    return one_f_one_b


def _alternating(chunk: int, count: int, *, warmup: int) -> Order:
    """`warmup` forwards, then a forward and a backward in turn while there are forwards, then the backwards left."""
    forwards = [Pass(FORWARD, chunk, i) for i in range(count)]
    backwards = [Pass(BACKWARD, chunk, i) for i in range(count)]
    return _merge(forwards, backwards, min(warmup, count))


def _merge(forwards: Order, backwards: Order, warmup: int) -> Order:
    steady = [step for pair in zip(forwards[warmup:], backwards, strict=False) for step in pair]
    return forwards[:warmup] + steady + backwards[len(forwards) - warmup :]


def _interleaved(rank: int, pp: int, vpp: int, count: int) -> Order:
    """Rounds of PP micro-batches pass a rank's chunks in turn, backwards in the opposite order of chunks."""
    turns = [(first + i, lap) for first in range(0, count, pp) for lap in range(vpp) for i in range(pp)]
    forwards = [Pass(FORWARD, lap * pp + rank, i) for i, lap in turns]
    backwards = [Pass(BACKWARD, (vpp - 1 - lap) * pp + rank, i) for i, lap in turns]
    return _merge(forwards, backwards, min(len(turns), 2 * (pp - 1 - rank) + (vpp - 1) * pp))


def _with_weights(rank: int, order: Order, count: int) -> Order:
    """ZB-H1: weight gradients lag `rank` micro-batches behind their backward, so that the last ones fill the cooldown.

    A rank then holds (PP − rank) + rank micro-batches: as many as the first rank of 1F1B, and no more.
    """
    lag = min(rank, count)
    steps: Order = []
    for step in order:
        steps.append(step)
        if step.kind == BACKWARD and step.microbatch >= lag:
            steps.append(Pass(WEIGHT, rank, step.microbatch - lag))
    return steps + [Pass(WEIGHT, rank, i) for i in range(count - lag, count)]
