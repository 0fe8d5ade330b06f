"""A device's clock records events and reads them later: it never lets the host wait."""

from __future__ import annotations

import pytest
import torch

from megavlm.backend.clock import clock_of
from megavlm.resilience.phases import COMMUNICATION, COMPUTE, DATA, OTHER, Phases


class Event:
    made = 0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing, "an event without timing has no time"
        self.at: int | None = None

    def record(self) -> None:
        Event.made += 1
        self.at = Event.made

    def elapsed_time(self, end: Event) -> float:
        assert self.at is not None
        assert end.at is not None
        return 1000.0 * (end.at - self.at)

    def synchronize(self) -> None:
        raise AssertionError("the host waits")


def test_seconds_are_those_between_events(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "Event", Event)
    phases = Phases(clock_of(torch.device("cuda")))
    phases.begin_step(1)
    for phase in (COMPUTE, COMMUNICATION, COMPUTE, OTHER):
        phases.enter(phase)
    phases.end_step()
    assert phases.last_step == {DATA: 1.0, COMPUTE: 2.0, COMMUNICATION: 1.0}
