"""Stop a run on a signal: the handler sets a flag; at the next step all ranks agree, save a checkpoint and exit."""

from __future__ import annotations

import signal
from types import FrameType


class StopRequest:
    """`requested` is True after SIGTERM or SIGINT. A second signal has its previous effect and ends the process."""

    def __init__(self) -> None:
        self.requested = False
        self._previous = {number: signal.signal(number, self._record) for number in (signal.SIGTERM, signal.SIGINT)}

    def _record(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        self.restore()

    def restore(self) -> None:
        """Restore the previous signal handlers."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)
