"""A device's clock records events and reads them later: it never lets the host wait."""

from __future__ import annotations

import pytest
import torch

from megavlm.backend.accelerator import clock_of
from megavlm.resilience.phases import COMMUNICATION, COMPUTE, DATA, OTHER, Phases


class Event:
    """Behaves as CUDA's events do: an event has a time once the device has reached it; asking earlier is an error."""

    made = 0
    passed = 0  # how far the device has got

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing, "an event without timing has no time"
        self.at: int | None = None

    def record(self) -> None:
        Event.made += 1
        self.at = Event.made

    def elapsed_time(self, end: Event) -> float:
        assert self.at is not None
        assert end.at is not None
        if not (self.query() and end.query()):
            raise RuntimeError("Both events must be completed before calculating elapsed time.")
        return 1000.0 * (end.at - self.at)

    def query(self) -> bool:
        return self.at is not None and self.at <= Event.passed

    def synchronize(self) -> None:
        raise AssertionError("the host waits")


@pytest.fixture
def phases(monkeypatch: pytest.MonkeyPatch) -> Phases:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    return Phases(clock_of(torch.device("cuda")))


def step(phases: Phases, iteration: int, *, unfinished: int) -> None:
    """A step of four seconds, at whose end the device has some moments before it."""
    phases.begin_step(iteration)
    for phase in (COMPUTE, COMMUNICATION, COMPUTE, OTHER):
        phases.enter(phase)
    Event.passed = Event.made - unfinished
    phases.end_step()


def test_seconds_are_those_between_events(phases: Phases):
    step(phases, 1, unfinished=0)
    assert [phases.totals.seconds[each] for each in (DATA, COMPUTE, COMMUNICATION)] == [1.0, 2.0, 1.0]


def test_a_step_that_the_device_has_not_ended_is_read_with_a_later_one(phases: Phases):
    counts = []
    for iteration, unfinished in enumerate((1, 6, 2, 0), start=1):
        step(phases, iteration, unfinished=unfinished)
        counts.append(phases.totals.steps)
    assert counts == [0, 0, 2, 4]
    assert [phases.totals.seconds[phase] for phase in (DATA, COMPUTE, COMMUNICATION)] == [4.0, 8.0, 4.0]
