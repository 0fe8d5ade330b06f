"""Signals only set a flag; ranks agree on it at the next step boundary, save, and leave together."""

from __future__ import annotations

import signal
from types import FrameType


class StopRequest:
    """True once SIGTERM or SIGINT has arrived. A second signal ends the process at once, as without us."""

    def __init__(self) -> None:
        self.requested = False
        self._previous = {number: signal.signal(number, self._record) for number in (signal.SIGTERM, signal.SIGINT)}

    def _record(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        self.restore()

    def restore(self) -> None:
        """Give the signals back to whoever had them before."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)
