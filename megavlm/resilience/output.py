"""Keep a run alive whose output is lost: a terminal that closed, `| head`, a log on a full disk, `>&-`."""

from __future__ import annotations

import io
import os
import sys
from typing import Any


class _Lossy(io.FileIO):
    """A file that drops what cannot be written."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError:
            return memoryview(data).nbytes


def open_closed_streams() -> None:
    """Open those of stdin, stdout and stderr that the shell has closed (`>&-`) on /dev/null, for this process and those
    that it starts. A file that is opened later would have their number, and get what is printed.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            assert os.open(os.devnull, os.O_RDWR) == number, "the lowest that is free"
            os.set_inheritable(number, True)
            setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))


def escape_unprintable() -> None:
    """Let stdout and stderr print what their encoding lacks (that of a locale without UTF-8) as \\xd7 or \\u2026."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


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
