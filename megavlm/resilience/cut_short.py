"""Agree on a place in a step at which all ranks give it up, because the run may be killed before the step ends.

A rank must not stop where another waits for it: all stop between the same two micro-batches, where a run without a
pipeline has no collective under way. A rank that was asked to stop proposes a place that it has not reached. Each rank
answers whether it has yet to reach it, and if so promises to wait there for the verdict. If all have promised, all give
up; else those that wait go on, and a later place is proposed: a commit in two phases (Gray 1978). The watchdog's thread
talks to the store; the training thread only looks at what that has agreed to, once per micro-batch.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from megavlm.resilience.store import Store


class StepCutShort(Exception):
    """Raised on all ranks at the place on which they have agreed; the step has changed no weights."""


class Place(NamedTuple):
    """The beginning of a micro-batch; later places are larger."""

    iteration: int
    micro_batch: int


class CutShort:
    """This rank's part in the agreement."""

    def __init__(
        self, rank: int, world: int, *, wanted: Callable[[], bool], soon: Callable[[], bool] = lambda: False
    ) -> None:
        """`soon()` returns whether this rank was asked to stop; `wanted()`, whether it was and has little time left."""
        self._rank, self._world, self._wanted, self._soon = rank, world, wanted, soon
        self._changed = threading.Condition()
        self._at = Place(0, 0)  # begun
        self._micro_batches = 0  # of the step that may be given up; 0 between such steps
        self._promised: Place | None = None
        self._agreed: Place | None = None
        self._furthest = Place(0, 0)  # that any rank was when a place was refused
        self._round = 0
        self._answered = False

    @contextmanager
    def step(self, iteration: int, micro_batches: int) -> Iterator[None]:
        """Let the step of this context be given up at one of its micro-batches."""
        with self._changed:
            self._at, self._micro_batches = Place(iteration, -1), micro_batches
        try:
            yield
        finally:
            with self._changed:
                self._micro_batches = 0

    def next_micro_batch(self) -> None:
        """Begin a micro-batch. The training thread calls it. Raises StepCutShort where all ranks have agreed to."""
        with self._changed:
            if not self._micro_batches:
                return
            here = Place(self._at.iteration, self._at.micro_batch + 1)
            while self._promised == here:
                self._changed.wait()
            if self._agreed == here:
                raise StepCutShort
            self._at = here

    def look(self, store: Store) -> bool:
        """Do what is to be done in the store; return whether to look again soon. Another thread calls it, often."""
        if self._agreed is not None:  # the last word: this rank may have yet to reach that place
            return False
        number = self._round
        if not store.check([f"cut/{number}"]):
            place = self._place_ahead() if self._wanted() else None
            if place is not None:
                store.compare_set(f"cut/{number}", "", json.dumps([self._rank, *place]))
            return place is not None or self._soon()
        leader, *fields = json.loads(store.get(f"cut/{number}"))
        place = Place(*fields)
        if not self._answered:
            store.set(f"cut/{number}/of/{self._rank}", json.dumps(self._promise(place)))
            self._answered = True
        if leader == self._rank:
            self._count(store, number)
        if store.check([f"cut/{number}/verdict"]):
            refused = [Place(*each) for each in json.loads(store.get(f"cut/{number}/verdict"))]
            self._settle(place, refused)
        return True

    def _place_ahead(self) -> Place | None:
        """Return the next place of this rank's step, if there is one."""
        with self._changed:
            reached = max(self._at, self._furthest)
            ahead = Place(reached.iteration, reached.micro_batch + 1)
            return ahead if self._promised is None and ahead.micro_batch < self._micro_batches else None

    def _promise(self, place: Place) -> Place | None:
        """Promise to wait at a place, unless this rank is there or further on; then return where it is."""
        with self._changed:
            if self._at >= place:
                return self._at
            self._promised = place
            return None

    def _count(self, store: Store, number: int) -> None:
        """Write the verdict once all ranks have answered."""
        answers = [f"cut/{number}/of/{rank}" for rank in range(self._world)]
        if store.check(answers):
            given = [json.loads(each) for each in store.multi_get(answers)]
            store.set(f"cut/{number}/verdict", json.dumps([each for each in given if each is not None]))

    def _settle(self, place: Place, refused: Sequence[Place]) -> None:
        """Go on past a place if ranks that were further on have `refused`, else give up the step there."""
        with self._changed:
            self._promised, self._agreed = None, None if refused else place
            self._furthest = max([self._furthest, *refused])
            self._round, self._answered = self._round + 1, False
            self._changed.notify_all()
