"""Find the steps that must not change the weights: their numbers are not finite, or their gradient is a spike.

A spike is a gradient norm beyond a factor times the median of the norms of the last `WINDOW` good steps. The decision
uses only numbers that every rank has before the update, so all ranks decide equally. The norms are part of a
checkpoint, so a resumed run decides like one that never stopped.
"""

from __future__ import annotations

import math
import re
import statistics
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

WINDOW = 128  # good steps whose median is the measure: longer than a spike lasts, shorter than a norm takes to drift
LEAST = 16  # good steps before a median means anything


@dataclass
class BadSteps:
    """Detector of bad steps, with the norms of recent good steps and counts of skipped steps."""

    spike_factor: float  # 0: no finite norm is a spike
    norms: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    in_a_row: int = 0
    skipped: int = 0  # steps of the whole run without an update

    def reason(self, loss: float, norm: float | None) -> str | None:
        """Return why a step must not change the weights; None if it may. `norm` is None where fp16 overflowed."""
        if not math.isfinite(loss):
            return f"the loss is {loss}"
        if norm is None:
            return None
        if not math.isfinite(norm):
            return f"the gradient norm is {norm}"
        if self.spike_factor and len(self.norms) >= LEAST:
            median = statistics.median(self.norms)
            if median and norm > self.spike_factor * median:
                return (
                    f"the gradient norm {norm:.3g} is {norm / median:.3g} times the median of the last "
                    f"{len(self.norms)} steps, more than --spike-factor {self.spike_factor:g}"
                )
        return None

    def good(self, norm: float) -> None:
        """Note a step that changed the weights."""
        self.norms.append(norm)
        self.in_a_row = 0

    def bad(self) -> None:
        """Note a step that was skipped because of its numbers."""
        self.in_a_row += 1
        self.skipped += 1

    def left_out(self) -> None:
        """Note a step that had no update for another reason: it was left out, or fp16 looks for its loss scale."""
        self.skipped += 1

    def go_back(self, state: Mapping[str, Any], *, left_out: int) -> None:
        """Restore a checkpoint's norms and count `left_out` skipped iterations after it; `in_a_row` is kept."""
        self.norms = deque(state.get("norms", ()), maxlen=WINDOW)
        self.skipped = int(state.get("skipped", 0)) + left_out

    def state_dict(self) -> dict[str, Any]:
        """Return the norms and counters for a checkpoint."""
        return {"norms": list(self.norms), "in_a_row": self.in_a_row, "skipped": self.skipped}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore norms and counters from a checkpoint; the empty state of a new run resets them."""
        self.norms = deque(state.get("norms", ()), maxlen=WINDOW)
        self.in_a_row = int(state.get("in_a_row", 0))
        self.skipped = int(state.get("skipped", 0))


def iterations(ranges: Iterable[str]) -> frozenset[int]:
    """Return the numbers that texts such as "12", "40-45" and "3,5" name. Raises ValueError for other texts."""
    found: set[int] = set()
    for text in filter(None, ",".join(ranges).split(",")):
        match = re.fullmatch(r"([1-9][0-9]*)(?:-([1-9][0-9]*))?", text)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise ValueError(text)
        found.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    return frozenset(found)
