"""Seconds by phase, and a mark that changes with progress."""

from __future__ import annotations

from megavlm.resilience.phases import COMMUNICATION, COMPUTE, DATA, OTHER, SAVE, Phases


class Counter:
    """Each moment is a second after the last."""

    def __init__(self) -> None:
        self.now = 0

    def moment(self) -> int:
        self.now += 1
        return self.now

    def has_passed(self, moment: int) -> bool:
        return True

    def seconds(self, earlier: int, later: int) -> float:
        return float(later - earlier)


def test_a_step_s_seconds_are_those_between_changes_of_phase():
    phases = Phases(Counter())
    for iteration in (1, 2):
        phases.begin_step(iteration)
        phases.enter(COMPUTE, "forward")
        phases.enter(COMPUTE, "backward")  # the same phase: no moment, but progress
        phases.enter(COMMUNICATION)
        phases.enter(COMPUTE)
        phases.enter(OTHER)
        phases.end_step()
    assert phases.totals.steps == 2
    assert [phases.totals.seconds[each] for each in (DATA, COMPUTE, COMMUNICATION)] == [2.0, 4.0, 2.0]


def test_every_entry_is_progress_and_says_where():
    phases = Phases()
    phases.begin_step(7)
    before = phases.now
    phases.enter(COMPUTE, "forward of chunk 0, micro-batch 1")
    assert phases.now.changes > before.changes
    assert phases.now[:3] == (7, COMPUTE, "forward of chunk 0, micro-batch 1")


def test_what_lies_between_steps_is_counted_by_the_host_s_clock():
    phases = Phases(Counter())
    phases.begin_step(1)
    phases.end_step()
    phases.enter(SAVE)
    phases.begin_step(2)
    assert 0 < phases.totals.seconds[SAVE] < 1.0
