"""A tracker that is slow, broken or stuck costs training nothing but a line."""

from __future__ import annotations

import threading

import pytest

from megavlm.metrics.callback import Callback, StepEnd, Stop
from megavlm.metrics.trackers import Background


class Slow(Callback):
    """Waits until it is let go, and counts."""

    def __init__(self) -> None:
        self.go, self.begun = threading.Event(), threading.Event()
        self.heard: list[int | str] = []

    def on_step_end(self, step: StepEnd) -> None:
        self.begun.set()
        self.go.wait(60)
        self.heard.append(step.iteration)

    def on_stop(self, stop: Stop) -> None:
        self.heard.append(stop.state)


def step(iteration: int) -> StepEnd:
    return StepEnd({"iteration": iteration})


def test_calls_wait_in_a_bounded_queue_and_the_rest_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    slow = Slow()
    tracker = Background("x", lambda: slow, capacity=3)
    tracker.on_step_end(step(1))
    assert slow.begun.wait(60)
    for iteration in range(2, 9):  # returns at once, although the tracker waits
        tracker.on_step_end(step(iteration))
    slow.go.set()
    tracker.on_stop(Stop(8, "finished"))
    assert slow.heard == [1, 2, 3, 4, "finished"]
    (line,) = capsys.readouterr().err.splitlines()
    assert "--tracker x is too slow" in line


def test_a_tracker_that_raises_is_told_once_without_secrets(capsys, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef")

    def make() -> Callback:
        raise SystemExit("no network\nfor key 0123456789abcdef")

    tracker = Background("x", make)
    for iteration in range(1, 5):
        tracker.on_step_end(step(iteration))
    tracker.on_stop(Stop(4, "failed"))
    (line,) = capsys.readouterr().err.splitlines()
    assert line == ("warning: --tracker x fails (SystemExit: no network for key ***): the run goes on without it")


def test_the_end_of_a_run_waits_for_a_stuck_tracker_for_a_while_only(capsys: pytest.CaptureFixture[str]) -> None:
    slow = Slow()
    tracker = Background("x", lambda: slow)
    tracker.on_step_end(step(1))
    tracker.on_stop(Stop(1, "finished"), patience=0.05)
    assert "within 0.05 s" in capsys.readouterr().err
    slow.go.set()
