"""Which rank holds the others up, given two tables of seconds."""

from __future__ import annotations

from megavlm.resilience.phases import COMMUNICATION, COMPUTE, DATA, SAVE
from megavlm.resilience.progress import Report, SlowEvents, Spread, spread


def report(rank: int, steps: int, process: int = 1, **seconds: float) -> Report:
    return Report(rank, f"node{rank}", process, 1, steps, COMPUTE, "", 0.0, "", False, steps=steps, seconds=seconds)


def test_a_rank_that_reads_slowly_is_named_with_the_phase_and_not_one_that_waits_for_it():
    """Row 23: rank 1 sleeps 1.5 s a step, rank 0 waits for its gradients."""
    before = {rank: report(rank, 2, compute=1.0, data=0.5, communication=0.0) for rank in (0, 1)}
    after = {
        0: report(0, 12, compute=6.0, data=0.6, communication=15.5),
        1: report(1, 12, compute=6.0, data=15.6, communication=0.5),
    }
    found = spread(before, after)
    assert found is not None
    assert (found.slowest, found.host, found.phase, found.steps) == (1, "node1", DATA, 10)
    assert round(found.own, 3) == 2.01
    assert found.notable
    assert "rank 1 (node1) takes 1.50 s per step more than the median, in data" in found.words
    assert round(found.seconds[COMMUNICATION], 3) == 0.8


def test_equal_ranks_are_not_worth_a_word():
    before = {rank: report(rank, 1, compute=0.0) for rank in range(4)}
    after = {rank: report(rank, 2, compute=1.0 + 0.02 * rank, save=9.0 * rank) for rank in range(4)}
    found = spread(before, after)
    assert found is not None
    assert not found.notable
    assert found.slowest == 3
    assert SAVE in found.seconds


def test_nothing_is_said_before_each_rank_has_done_a_step_nor_over_a_restart():
    early, late = {0: report(0, 0), 1: report(1, 3)}, {0: report(0, 4), 1: report(1, 4)}
    assert spread(early, late) is None
    assert spread(late, late) is None
    assert spread({0: report(0, 1), 1: report(1, 1, process=7)}, late) is None
    assert spread({}, late) is None


def slow(rank: int, excess: float = 0.5, phase: str = COMPUTE) -> Spread:
    return Spread(steps=1, seconds={}, slowest=rank, host="node", own=1.5, excess=excess, phase=phase)


def test_a_rank_that_stays_slow_is_an_event_now_and_then():
    wanted = SlowEvents()
    said = [second for second in range(0, 2_000, 5) if wanted.wants(slow(1), float(second))]
    assert said == [10, 610, 1210, 1810]


def test_reports_that_name_one_rank_after_another_are_no_event():
    """Noise: somebody is always the slowest."""
    wanted = SlowEvents()
    reports = [slow(1), slow(2), slow(1), slow(1, phase=DATA), slow(1), slow(1, excess=0.05), slow(1), slow(1)]
    assert not any(wanted.wants(found, float(second)) for second, found in enumerate(reports))
    assert wanted.wants(slow(1), 100.0)
