"""Programs of ranks: no two ranks wait for each other, however their devices order transfers."""

from __future__ import annotations

from collections import defaultdict, deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megavlm.arch.schedules import Pass, PipelineShape, rank_schedules
from megavlm.pipeline.walker import Receive, maker, rank_program, receiver

SHAPES = st.one_of(
    st.builds(
        PipelineShape,
        schedule=st.sampled_from(["gpipe", "1f1b", "zb-h1"]),
        pp=st.integers(2, 6),
        vpp=st.just(1),
        micro_batches=st.integers(1, 12),
    ),
    st.tuples(st.integers(2, 4), st.integers(2, 3), st.integers(1, 3)).map(
        lambda drawn: PipelineShape("interleaved", drawn[0], drawn[1], drawn[0] * drawn[2])
    ),
)
Program = list[Pass | Receive]


def programs_of(shape: PipelineShape) -> list[Program]:
    return [list(rank_program(shape, rank)) for rank in range(shape.pp)]


@settings(max_examples=60, deadline=None)
@given(shape=SHAPES)
def test_a_rank_runs_the_schedules_passes_and_receives_what_they_need(shape: PipelineShape) -> None:
    for program, order in zip(programs_of(shape), rank_schedules(shape), strict=True):
        assert [each for each in program if isinstance(each, Pass)] == list(order)
        begun = set()
        for each in program:
            if isinstance(each, Receive):
                begun.add(each.made_by)
            elif (needed := maker(each, shape)) is not None:
                begun.remove(needed)  # begun before, and each is received once
        assert not begun


def ends(programs: list[Program], shape: PipelineShape) -> bool:
    """Return whether all ranks come to their end if the transfers of each pair of ranks run one after the other, in
    the order in which a rank begins them, and a transfer takes place when both have come to it.
    """
    places = [0] * shape.pp
    queues: defaultdict[tuple[int, int], deque[Pass]] = defaultdict(deque)  # of (rank, other): begun, not done
    here: set[Pass] = set()
    moved = True
    while moved:
        moved = False
        for rank, program in enumerate(programs):
            if places[rank] == len(program):
                continue
            each = program[places[rank]]
            if isinstance(each, Receive):
                queues[rank, each.made_by.chunk % shape.pp].append(each.made_by)
            else:
                needed = maker(each, shape)
                if needed is not None and needed not in here:
                    continue
                to = receiver(each, shape)
                if to is not None:
                    queues[rank, to.chunk % shape.pp].append(each)
            places[rank] += 1
            moved = True
        for (rank, other), own in queues.items():
            theirs = queues.get((other, rank))
            while own and theirs and own[0] == theirs[0]:
                here.add(own.popleft())
                theirs.popleft()
                moved = True
    return places == [len(program) for program in programs]


@settings(max_examples=60, deadline=None)
@given(shape=SHAPES)
def test_no_two_ranks_wait_for_each_other(shape: PipelineShape) -> None:
    assert ends(programs_of(shape), shape)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
@pytest.mark.parametrize(("pp", "micro_batches"), [(2, 2), (4, 4), (4, 16), (8, 32)])
def test_few_tensors_are_received_before_they_are_needed(schedule, pp: int, micro_batches: int) -> None:
    shape = PipelineShape(schedule, pp, 1, micro_batches)
    for program in programs_of(shape):
        waiting = most = 0
        for each in program:
            if isinstance(each, Receive):
                waiting += 1
            elif maker(each, shape) is not None:
                waiting -= 1
            most = max(most, waiting)
        assert most <= 2
