"""Say how a process of multiprocessing ended."""

from __future__ import annotations

import signal
import time
from multiprocessing.process import BaseProcess

_MOMENT = 1.0  # seconds within which another thread keeps the status that it was given


def how_it_ended(process: BaseProcess, timeout: float | None = None) -> str:
    """Return "was ended by SIGSEGV" or "ended with status 1"; "was lost" if no status is to be had.

    Waits up to `timeout` seconds for the end of the process (None: until it ends).

    The kernel gives the status of a process away once. Each thread that starts a process takes it for all that have
    ended (`multiprocessing.process._cleanup`), and keeps it a moment later: until then `join` returns at once, and
    `exitcode` is None.
    """
    process.join(timeout)
    patience = time.monotonic() + _MOMENT
    while (status := process.exitcode) is None:
        if time.monotonic() > patience:
            return "was lost"
        time.sleep(0.001)
    return f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
