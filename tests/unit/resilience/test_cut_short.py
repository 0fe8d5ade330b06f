"""Ranks agree on one place at which all of them give up a step, or none does."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import pytest
import torch.distributed as dist

from megavlm.resilience.cut_short import CutShort, StepCutShort

PATIENCE = 60.0
STEPS, MICRO_BATCHES = 3, 40


class Rank:
    """Trains in one thread and looks at the store in another; `lags` are its seconds per micro-batch."""

    def __init__(self, cut: CutShort, store: dist.Store, lag: float, barrier: threading.Barrier) -> None:
        self.cut, self.store, self.lag, self.barrier = cut, store, lag, barrier
        self.place: tuple[int, int] | None = None
        self.given_up: tuple[int, int] | None = None
        self.over = threading.Event()
        self.threads = [threading.Thread(target=each) for each in (self._train, self._look)]

    def _train(self) -> None:
        for iteration in range(1, STEPS + 1):
            try:
                with self.cut.step(iteration, MICRO_BATCHES):
                    for micro_batch in range(MICRO_BATCHES):
                        self.place = iteration, micro_batch
                        self.cut.next_micro_batch()
                        time.sleep(self.lag)
            except StepCutShort:
                self.given_up = self.place
                break
            self.barrier.wait(PATIENCE)  # the end of a step: ranks sum its numbers
        self.over.set()

    def _look(self) -> None:
        while not self.over.wait(0.005):
            self.cut.look(self.store)


def train(lags: Sequence[float], wanted: Callable[[int], Callable[[], bool]]) -> list[tuple[int, int] | None]:
    """Train on ranks of these speeds; returns where each gave up."""
    store, barrier = dist.PrefixStore("run", dist.HashStore()), threading.Barrier(len(lags))
    ranks = [
        Rank(CutShort(rank, len(lags), wanted=wanted(rank)), store.clone(), lag, barrier)
        for rank, lag in enumerate(lags)
    ]
    for rank in ranks:
        for thread in rank.threads:
            thread.start()
    for rank in ranks:
        for thread in rank.threads:
            thread.join(PATIENCE)
            assert not thread.is_alive(), "a rank waits for a verdict that does not come"
    return [rank.given_up for rank in ranks]


@pytest.mark.parametrize("asked", [[0], [2], [0, 1, 2]])
@pytest.mark.parametrize("lags", [[0.01, 0.01, 0.01], [0.03, 0.005, 0.01]])
def test_all_give_up_at_one_place(lags: list[float], asked: list[int]):
    """Whoever was asked, and however far apart they are."""
    soon = time.monotonic() + 0.1

    def wanted(rank: int) -> Callable[[], bool]:
        return lambda: rank in asked and time.monotonic() > soon

    (place,) = set(train(lags, wanted))
    if place is not None:  # the slow rank proposes places that the others have passed, up to the end of the step
        assert place[1] < MICRO_BATCHES
    if len(set(lags)) == 1:
        assert place is not None
        assert place[0] < STEPS  # the first, unless threads were kept waiting by the machine


def test_nobody_gives_up_unasked():
    assert train([0.001, 0.002], lambda rank: lambda: False) == [None, None]


def test_a_rank_that_is_further_on_refuses():
    """And the next proposal is a place that it has not reached either."""
    store = dist.PrefixStore("run", dist.HashStore())
    behind, ahead = CutShort(0, 2, wanted=lambda: True), CutShort(1, 2, wanted=lambda: False)
    with behind.step(1, 9), ahead.step(1, 9):
        behind.next_micro_batch()
        for _ in range(5):
            ahead.next_micro_batch()
        for _ in range(8):
            behind.look(store)
            ahead.look(store)
        for _ in range(4):
            behind.next_micro_batch()  # up to the place where the other is
        for each in (behind, ahead):
            with pytest.raises(StepCutShort):
                each.next_micro_batch()


def test_outside_of_steps_nothing_is_given_up():
    """As in an evaluation, or where there is a pipeline."""
    store = dist.PrefixStore("run", dist.HashStore())
    cut = CutShort(0, 1, wanted=lambda: True)
    for micro_batches in (0, 0):
        with cut.step(1, micro_batches):
            cut.look(store)
            cut.next_micro_batch()
    cut.look(store)
    cut.next_micro_batch()
    assert not store.check(["cut/0"])
