"""Schedules against closed forms, against megatron-core's own tables, and against what no schedule can break."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megavlm.arch.schedules import (
    BACKWARD,
    FORWARD,
    WEIGHT,
    PipelineShape,
    ScheduleName,
    peak_in_flight,
    rank_schedules,
    simulate,
    uniform,
)

SIZES = [(p, m) for p in (1, 2, 4) for m in (1, 3, 4, 13) if m >= p]


@pytest.mark.parametrize(("pp", "micro"), SIZES)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_equal_stages_leave_the_bubble_of_the_closed_form(schedule: ScheduleName, pp: int, micro: int) -> None:
    timeline = simulate(PipelineShape(schedule, pp, 1, micro), uniform([1.0] * pp, [2.0] * pp, micro_batches=micro))
    assert timeline.seconds == pytest.approx((micro + pp - 1) * 3.0)
    assert timeline.bubble == pytest.approx((pp - 1) / (micro + pp - 1))


@pytest.mark.parametrize(("pp", "vpp", "rounds"), [(2, 2, 1), (2, 2, 4), (4, 2, 2), (4, 4, 3), (8, 3, 2)])
def test_interleaving_divides_the_bubble(pp: int, vpp: int, rounds: int) -> None:
    """(p − 1)/v idle chunk-passes of each kind: Narayanan et al. 2021, section 2.2."""
    micro, chunks = pp * rounds, pp * vpp
    timeline = simulate(
        PipelineShape("interleaved", pp, vpp, micro), uniform([1.0] * chunks, [2.0] * chunks, micro_batches=micro)
    )
    assert timeline.seconds == pytest.approx((micro * vpp + pp - 1) * 3.0)


@pytest.mark.parametrize(("pp", "micro"), [(p, m) for p, m in SIZES if m >= 2 * p - 1])
def test_zero_bubble_idles_for_f_plus_b_less_w(pp: int, micro: int) -> None:
    """(p − 1)(F + B − W): Qi et al. 2023, table 1, for F = B = W; at 1F1B's peak memory."""
    shape = PipelineShape("zb-h1", pp, 1, micro)
    ones = [1.0] * pp
    timeline = simulate(shape, uniform(ones, ones, weight=ones, micro_batches=micro))
    assert timeline.seconds == pytest.approx(micro * 3.0 + (pp - 1) * 1.0)
    assert max(count for rank in peak_in_flight(shape) for count in rank) <= min(pp, micro)


@pytest.mark.parametrize(("pp", "micro"), SIZES)
def test_activations_in_flight(pp: int, micro: int) -> None:
    assert peak_in_flight(PipelineShape("1f1b", pp, 1, micro)) == tuple((min(micro, pp - rank),) for rank in range(pp))
    assert peak_in_flight(PipelineShape("gpipe", pp, 1, micro)) == ((micro,),) * pp


SHAPES = st.one_of(
    st.builds(
        PipelineShape,
        schedule=st.sampled_from(["gpipe", "1f1b", "zb-h1"]),
        pp=st.integers(1, 5),
        vpp=st.just(1),
        micro_batches=st.integers(1, 9),
    ),
    st.tuples(st.integers(2, 4), st.integers(2, 3), st.integers(1, 3)).map(
        lambda drawn: PipelineShape("interleaved", drawn[0], drawn[1], drawn[0] * drawn[2])
    ),
)


@settings(max_examples=60, deadline=None)
@given(shape=SHAPES, data=st.data())
def test_what_every_schedule_keeps(shape: PipelineShape, data: st.DataObject) -> None:
    times = st.lists(st.floats(0.1, 3.0), min_size=shape.chunks, max_size=shape.chunks)
    forward, backward, weight = (data.draw(times) for _ in range(3))
    transfer = data.draw(st.floats(0, 1))
    durations = uniform(
        forward, backward, weight=weight, transfer=[transfer] * (shape.chunks - 1), micro_batches=shape.micro_batches
    )
    timeline = simulate(shape, durations, keep_events=True)
    apart = shape.schedule == "zb-h1"
    kinds = (FORWARD, BACKWARD, WEIGHT) if apart else (FORWARD, BACKWARD)
    ends = {(e.step.kind, e.step.chunk, e.step.micro): e.end for e in timeline.events}
    starts = {(e.step.kind, e.step.chunk, e.step.micro): e.start for e in timeline.events}
    assert len(ends) == len(timeline.events) == len(kinds) * shape.chunks * shape.micro_batches
    slack = 1e-9
    for rank in range(shape.pp):
        free = 0.0
        for step in (event.step for event in timeline.events if event.rank == rank):
            kind, chunk, micro = step.kind, step.chunk, step.micro
            inputs = [free]
            if kind == FORWARD and chunk:
                inputs.append(ends[FORWARD, chunk - 1, micro] + transfer)
            if kind == BACKWARD:
                inputs.append(ends[FORWARD, chunk, micro])
            if kind == BACKWARD and chunk < shape.chunks - 1:
                inputs.append(ends[BACKWARD, chunk + 1, micro] + transfer)
            if kind == WEIGHT:
                inputs.append(ends[BACKWARD, chunk, micro])
            # Neither before its inputs are there nor a moment after.
            assert starts[kind, chunk, micro] == pytest.approx(max(inputs), abs=slack)
            free = ends[kind, chunk, micro]
    # Fill, own work, drain; weight gradients at a step's end drain nowhere.
    work = [f + b for f, b in zip(forward, backward, strict=True)]
    for rank in range(shape.pp):
        mine = [e for e in timeline.events if e.rank == rank]
        assert all(a.end <= b.start + slack for a, b in pairwise(mine))
        before = sum(forward[:rank]) + sum(backward[:rank])
        own = shape.micro_batches * sum(work[rank :: shape.pp])
        assert timeline.seconds + slack >= before + own
    assert 0 <= timeline.bubble < 1


def test_orders_are_megatron_cores() -> None:
    schedules = pytest.importorskip("megatron.core.pipeline_parallel.schedules")
    pp, vpp, micro = 4, 3, 12
    table = schedules.get_schedule_table(micro, vpp, pp)
    for rank, order in enumerate(rank_schedules(PipelineShape("interleaved", pp, vpp, micro))):
        assert [(s.micro, s.chunk // pp) for s in order if s.kind == FORWARD] == table
        assert [(s.micro, vpp - 1 - s.chunk // pp) for s in order if s.kind == BACKWARD] == table
        warmup = next(i for i, s in enumerate(order) if s.kind == BACKWARD) - 1
        assert warmup == (pp - rank - 1) * 2 + (vpp - 1) * pp
