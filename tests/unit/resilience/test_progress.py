"""Who is late, given a table of what ranks report."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megavlm.resilience.hang_reports import DOOMED, FIRST_STEP, Limits, Report, SlowEvents, culprit, sentence, spread
from megavlm.resilience.phases import COMMUNICATION, COMPUTE, DATA, END, SAVE, START, VALIDATION


def report(rank: int, **changed) -> Report:
    fixed = Report(
        rank=rank,
        host="node1",
        process=100 + rank,
        beat=9,
        iteration=13,
        phase=COMPUTE,
        detail="forward of chunk 0, micro-batch 3",
        idle=70.0,
        place="",
        waits=False,
        steps=12,
    )
    return replace(fixed, **changed)


LIMITS = Limits(data=900.0, collective=600.0)


def named(*table: Report, timeout: float = 60.0) -> int | None:
    found = culprit(table, timeout=timeout, limits=LIMITS, interval=5.0)
    return None if found is None else found.rank


def test_the_rank_whose_process_is_stopped_is_named_and_not_one_that_waits_for_it():
    """The attack's row 3: rank 0 waits in a collective, rank 1 stopped while its last report said that it computes."""
    assert named(report(0, idle=65.0, waits=True), report(1, idle=2.0, silent=66.0)) == 1
    assert named(report(0, idle=2.0, silent=66.0), report(1, idle=65.0, waits=True)) == 0
    stopped_in_a_wait = report(1, idle=2.0, silent=66.0, waits=True)
    assert named(report(0, idle=65.0, waits=False), stopped_in_a_wait) == 1  # 0 polls what 1 would answer


def test_of_ranks_that_answer_the_one_that_does_not_wait_is_named():
    assert named(report(0, waits=True, idle=80.0), report(1, waits=False), report(2, waits=True, idle=90.0)) == 1


def test_where_all_wait_the_rank_that_is_behind_is_named_and_then_the_one_that_began_first():
    waiting = [report(rank, waits=True) for rank in range(4)]
    assert named(*waiting[:2], replace(waiting[2], iteration=12), waiting[3]) == 2
    assert named(*waiting[:3], replace(waiting[3], idle=75.0)) == 3


@pytest.mark.parametrize(
    ("changed", "hangs"),
    [
        ({"idle": 59.0}, False),
        ({"idle": 61.0}, True),
        ({"idle": 61.0, "phase": SAVE}, False),
        ({"idle": 61.0, "phase": VALIDATION}, False),
        ({"idle": 61.0, "steps": 0}, False),
        ({"idle": FIRST_STEP + 1, "steps": 0}, True),
        ({"idle": 301.0, "phase": SAVE}, True),
        ({"silent": 59.0, "phase": SAVE}, False),
        ({"silent": 61.0, "phase": SAVE}, True),  # a process that does not answer is not busy
        ({"silent": 61.0, "phase": START, "steps": 0}, False),
        ({"silent": 500.0, "phase": END}, False),  # a rank that is done sends no reports
        ({"idle": 890.0, "phase": DATA}, False),  # a data worker that hangs is replaced meanwhile
        ({"idle": 910.0, "phase": DATA}, True),
        ({"idle": 61.0, "phase": DATA, "waits": True}, True),  # for another rank, not for data
        ({"idle": 86390.0, "phase": START, "steps": 0}, False),
        ({"idle": 86410.0, "phase": START, "steps": 0}, True),
    ],
)
def test_a_save_an_evaluation_and_a_first_step_may_take_longer(changed, hangs: bool):
    assert (named(report(0, **changed)) is not None) is hangs


def test_a_rank_that_waits_for_another_rank_s_save_does_not_hang():
    assert named(report(0, phase=SAVE, idle=200.0), report(1, phase=DATA, idle=200.0, waits=True)) is None


def test_who_keeps_others_waiting_is_named_before_torch_ends_these_without_a_name():
    """In phases in which a rank may take longer than a collective of another may wait for it."""
    busy = report(0, phase=START, steps=0, idle=DOOMED * 600 + 9)
    waiting = replace(busy, rank=1, waits=True)
    assert named(busy, replace(waiting, waited=DOOMED * 600 - 1)) is None
    assert named(busy, replace(waiting, waited=DOOMED * 600 + 1)) == 0


@pytest.mark.parametrize("iteration", [0, 11])
def test_what_a_stopped_rank_said_long_ago_does_not_count(iteration: int):
    """Reports are seconds apart, and steps may be shorter."""
    early = {"iteration": iteration, "steps": 0, "phase": START, "idle": 0.0, "silent": 66.0}
    assert named(report(0, idle=65.0, waits=True), report(1, **early)) == 1


def test_the_default_is_ten_median_steps_and_never_below_a_minute():
    assert Limits().timeout([1.0, 2.0, 300.0]) == 60.0
    assert Limits().timeout([20.0, 30.0, 3000.0]) == 300.0
    assert Limits().timeout([]) == 60.0
    assert Limits(7.0).timeout([20.0]) == 7.0


def test_the_line_names_rank_host_place_and_that_it_does_not_answer():
    table = [report(0, idle=65.0, waits=True), report(1, idle=2.0, silent=66.0)]
    line = sentence(table[1], table, interval=5.0)
    assert line.startswith("rank 1 (node1, process 101) has made no progress for 68 s in iteration 13, compute (forwar")
    assert "micro-batch 3" in line
    assert "does not answer" in line
    assert line.endswith("of the others, 1 of 1 wait in a collective")


def test_a_report_survives_the_store():
    sent = report(3, seconds={COMPUTE: 1.5})
    assert Report.loads(sent.dumps()) == sent


def steps_of(rank: int, steps: int, process: int = 1, **seconds: float) -> Report:
    return Report(rank, f"node{rank}", process, 1, steps, COMPUTE, "", 0.0, "", False, steps=steps, seconds=seconds)


def test_a_rank_that_reads_slowly_is_named_with_the_phase_and_not_one_that_waits_for_it():
    """Row 23: rank 1 sleeps 1.5 s a step, rank 0 waits for its gradients."""
    before = {rank: steps_of(rank, 2, compute=1.0, data=0.5, communication=0.0) for rank in (0, 1)}
    after = {
        0: steps_of(0, 12, compute=6.0, data=0.6, communication=15.5),
        1: steps_of(1, 12, compute=6.0, data=15.6, communication=0.5),
    }
    found = spread(before, after)
    assert (found["slowest_rank"], found["slowest_rank_phase"], round(found["slowest_rank_s"], 3)) == (1, DATA, 2.01)
    assert found["slow"] == "rank 1 (node1) takes 1.50 s per step more than the median, in data"
    assert round(found["phase_seconds"][COMMUNICATION], 3) == 0.8


def test_equal_ranks_are_not_worth_a_word():
    before = {rank: steps_of(rank, 1, compute=0.0) for rank in range(4)}
    after = {rank: steps_of(rank, 2, compute=1.0 + 0.02 * rank, save=9.0 * rank) for rank in range(4)}
    found = spread(before, after)
    assert "slow" not in found
    assert found["slowest_rank"] == 3
    assert SAVE in found["phase_seconds"]


def test_nothing_is_said_before_each_rank_has_done_a_step_nor_over_a_restart():
    early, late = {0: steps_of(0, 0), 1: steps_of(1, 3)}, {0: steps_of(0, 4), 1: steps_of(1, 4)}
    assert spread(early, late) is None
    assert spread(late, late) is None
    assert spread({0: steps_of(0, 1), 1: steps_of(1, 1, process=7)}, late) is None
    assert spread({}, late) is None


def slow(rank: int, phase: str = COMPUTE) -> dict[str, object]:
    return {"slowest_rank": rank, "slowest_rank_phase": phase, "slow": "it is slow"}


def test_a_rank_that_stays_slow_is_an_event_now_and_then():
    wanted = SlowEvents()
    said = [second for second in range(0, 2_000, 5) if wanted.wants(slow(1), float(second))]
    assert said == [10, 610, 1210, 1810]


def test_reports_that_name_one_rank_after_another_are_no_event():
    """Noise: somebody is always the slowest."""
    wanted = SlowEvents()
    reports = [slow(1), slow(2), slow(1), slow(1, phase=DATA), slow(1), {}, slow(1), slow(1)]
    assert not any(wanted.wants(found, float(second)) for second, found in enumerate(reports))
    assert wanted.wants(slow(1), 100.0)
