"""Keep a run alive whose output is lost: a terminal that closed, `| head`, a log on a full disk."""

from __future__ import annotations

import io
import sys
from typing import Any


class _Lossy(io.FileIO):
    """A file that drops what cannot be written."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError:
            return memoryview(data).nbytes


def survive_lost_output() -> None:
    """Let stdout and stderr of this process, from now on, drop what cannot be written instead of raising OSError."""
    sys.stdout.flush()
    sys.stderr.flush()
    sys.stdout, sys.stderr = (
        io.TextIOWrapper(
            io.BufferedWriter(_Lossy(number, "w", closefd=False)), errors="backslashreplace", line_buffering=True
        )
        for number in (1, 2)
    )
