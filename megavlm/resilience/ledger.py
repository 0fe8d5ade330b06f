"""Divide a stretch of time among causes, without gap or overlap, in whole microseconds."""

from __future__ import annotations

from collections.abc import Mapping

BINS = 240  # equal parts of the whole time, whose causes are known one by one


class Ledger:
    """Gives the time from `begin` to `end` to causes: a cursor moves on, and what it passes goes to the cause named.

    All causes add up to end − begin once the cursor is at the end, whatever it was told on the way.
    """

    def __init__(self, begin: int, end: int, *, bins: int = BINS) -> None:
        self.cursor = begin
        self._begin, self._end = begin, end
        self._bins: list[dict[str, int]] = [{} for _ in range(bins)]
        self._bin = 0  # that of the cursor

    def fill(self, until: int, cause: str) -> None:
        """Give the time from the cursor to `until` to a cause. Where the cursor is later already, nothing changes."""
        until = min(until, self._end)
        while self.cursor < until:
            edge = self._begin + (self._end - self._begin) * (self._bin + 1) // len(self._bins)
            if edge <= self.cursor:
                self._bin += 1
                continue
            reached = min(until, edge)
            held = self._bins[self._bin]
            held[cause] = held.get(cause, 0) + reached - self.cursor
            self.cursor = reached

    def spend(self, duration: int, cause: str, *, until: int) -> None:
        """Give this much time to a cause, but none after `until`."""
        self.fill(min(self.cursor + duration, until), cause)

    def close(self, cause: str) -> tuple[Mapping[str, int], ...]:
        """Give what is left to a cause; return the microseconds of each bin by cause."""
        self.fill(self._end, cause)
        return tuple(self._bins)
