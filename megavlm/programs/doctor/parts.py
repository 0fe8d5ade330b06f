"""Let no part of a check of many processes wait for ever: name the ranks that keep the others waiting, and end.

A thread of each rank tells the store every second that its process lives, and in which part it is. Once a part has
taken too long on any rank, the first to notice reads what all ranks told, says it in one line, and every rank ends.
The thread has a connection of its own, since the main thread may hold the other one while it waits.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch.distributed as dist

from megavlm.programs.doctor.problems import Problem

_BEAT = 0.5  # seconds between signs of life
_SILENT = 5.0  # seconds after which a process that gives none is taken to be stopped


@dataclass(frozen=True)
class Sign:
    """What a rank told last: how often it told something, and the number and name of its part."""

    beat: int
    number: int
    part: str


class Parts:
    """The parts of a check on one rank; `close` ends the watch."""

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        world: int,
        *,
        limit: float,
        tell: Callable[[Problem], None],
        end: Callable[[int], object] = os._exit,
    ) -> None:
        """Begin the first part. `limit` is in seconds for each; one rank calls `tell`, and then all call `end`."""
        self._store, self._rank, self._world = store.clone(), rank, world  # type: ignore[attr-defined]
        self._limit, self._tell, self._end = limit, tell, end
        self._now = (0, "start", time.monotonic())
        self._beat, self._beaten = 0, time.monotonic()
        self._closed = threading.Event()
        self._threads = [threading.Thread(target=each, daemon=True) for each in (self._watch, self._guard)]
        for thread in self._threads:
            thread.start()

    def begin(self, part: str) -> None:
        number, _, _ = self._now
        self._now = (number + 1, part, time.monotonic())

    def close(self) -> None:
        self._closed.set()
        for thread in self._threads:
            thread.join(timeout=5)

    def fail(self, reason: str) -> None:
        """Report an error of this rank, unless another was first, and let all ranks end."""
        self._closed.set()
        if self._store.add("doctor/gave-up", 1) == 1:
            what = f"rank {self._rank} of {self._world}: {reason.partition(chr(10))[0][:200]} (in: {self._now[1]})"
            self._tell(Problem("error", what, "look at this rank's host; NCCL_DEBUG=INFO says more of a link"))
            self._store.set("doctor/end", "")

    def _watch(self) -> None:
        try:
            while not self._closed.wait(_BEAT):
                self._show_life()
                if time.monotonic() - self._now[2] > self._limit:
                    self._give_up()
                if self._store.check(["doctor/end"]):
                    self._end(1)
        except dist.DistError as error:  # the store went away with rank 0 or with torchrun
            if not self._closed.is_set():
                self._tell(lost(str(error), self._now[1]))
                self._end(1)

    def _guard(self) -> None:
        """End this process if the store itself does not answer: its host may be suspended, and no call would return."""
        while not self._closed.wait(_BEAT):
            if time.monotonic() - self._beaten > self._limit + 2 * _SILENT:
                self._tell(lost("no answer", self._now[1]))
                self._end(1)

    def _show_life(self) -> None:
        number, part, _ = self._now
        self._beat += 1
        self._store.set(_key(self._rank), f"{self._beat} {number} {part}")
        self._beaten = time.monotonic()

    def _give_up(self) -> None:
        if self._store.add("doctor/gave-up", 1) == 1:
            before = self._signs()
            time.sleep(_SILENT)
            self._show_life()
            self._tell(blame(before, self._signs(), world=self._world, seconds=self._limit))
            self._store.set("doctor/end", "")

    def _signs(self) -> dict[int, Sign]:
        found = {}
        for rank in range(self._world):
            if self._store.check([_key(rank)]):
                beat, number, part = self._store.get(_key(rank)).decode().split(" ", 2)
                found[rank] = Sign(int(beat), int(number), part)
        return found


def blame(before: Mapping[int, Sign], after: Mapping[int, Sign], *, world: int, seconds: float) -> Problem:
    """Return what keeps the ranks waiting, from two looks at what all of them told: who is silent, else who is behind.

    The rank that looks shows life between the two, so that at least one is not silent.
    """
    missing = [rank for rank in range(world) if rank not in after]
    silent = [rank for rank in before if after[rank].beat == before[rank].beat]
    first = min(sign.number for sign in after.values())
    behind = [rank for rank, sign in after.items() if sign.number == first]
    if stopped := sorted({*missing, *silent}):
        part = next((after[rank].part for rank in stopped if rank in after), "start")
        what = f"{ranks_in_words(stopped)} of {world} did not answer within {seconds:.0f} s (in: {part})"
        return Problem("error", what, "look at its process and host: stopped, swapping, or cut off from the network")
    part = after[behind[0]].part
    if len(behind) < len(after):
        what = f"{ranks_in_words(behind)} of {world} kept the others waiting for {seconds:.0f} s (in: {part})"
        return Problem("error", what, "look at its host, or start again with a longer --timeout")
    what = f"all {world} ranks waited for {seconds:.0f} s in: {part}"
    return Problem(
        "error",
        what,
        "the network does not carry it: NCCL_DEBUG=INFO, NCCL_SOCKET_IFNAME, firewall; or a longer --timeout",
    )


def lost(reason: str, part: str) -> Problem:
    """Return what a rank says that has lost the store."""
    what = f"the store at MASTER_ADDR does not answer (in: {part}): {reason.partition(chr(10))[0][:120]}"
    return Problem("error", what, "look at rank 0's output and at that of its torchrun")


def ranks_in_words(ranks: Sequence[int]) -> str:
    """Return `rank 3` or `ranks 3, 5`; of more than eight, how many."""
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank{'s'[: len(ranks) > 1]} {shown}"


def _key(rank: int) -> str:
    return f"doctor/sign/{rank}"
