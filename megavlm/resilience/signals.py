"""Receive requests to stop (a signal, or the end of torchrun) in a thread, and say how other processes ended.

Python runs signal handlers between the instructions of the main thread, which may wait in a collective or compute for
minutes. The interpreter also writes each signal to a "wakeup" pipe at once, which a thread reads.
"""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from multiprocessing.process import BaseProcess
from typing import Literal

from megavlm.program import started_as
from megavlm.resilience.events import STOPPED

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_WARNINGS = (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)  # SIGTERM may come after them

# A signal that comes this soon after the first is the same request: schedulers send to torchrun and to all ranks at
# once, and torchrun passes on what it gets.
_SAME_REQUEST = 5.0  # seconds
_LOOK_AT_PARENT = 1.0  # seconds
_ORPHANED = 120.0  # seconds in which a process whose torchrun is gone may do a step and save
_MOMENT = 1.0  # seconds within which another thread keeps the status that it was given


class StopRequest:
    """State of a request to stop this process, with its reason. Without `listen`, signals make no requests."""

    def __init__(self) -> None:
        self.reason: str | None = None
        self._asked = 0.0
        self._warned = False  # the request was a warning of a scheduler, which its SIGTERM may follow
        self._lock = threading.Lock()
        self._phase: Literal["starting", "training", "closing"] = "starting"

    @property
    def requested(self) -> bool:
        return self.reason is not None

    def training(self) -> None:
        """Enter training: requests now wait for the loop to save. Before, they end the process at once."""
        with self._lock:
            self._phase = "training"

    def saved(self) -> None:
        """Declare that all is saved: from now on, or if one is pending, a request ends the process at once."""
        with self._lock:
            self._phase = "starting"
            if self.reason is not None:
                _end(STOPPED, f"{self.reason}: ends, all is saved")

    def closing(self) -> None:
        """Ignore requests from now on: the process ends by itself."""
        with self._lock:
            self._phase = "closing"

    def ask(self, reason: str, *, warning: bool) -> None:
        """Request a stop. A request within 5 s of the first counts as the same, and so does the first request without
        `warning` after one with it. Any other second request ends the process at once.
        """
        with self._lock:
            now = time.monotonic()
            if self._phase == "closing":
                return
            if self._phase == "starting":
                _end(STOPPED, f"{reason}: ends, there is nothing to save")
            if self.reason is None or (self._warned and not warning):
                if self.reason is None and os.environ.get("LOCAL_RANK", "0") == "0":
                    _say(f"{reason}: saves a checkpoint after this step and ends")
                self.reason, self._asked, self._warned = reason, now, warning
            elif now - self._asked > _SAME_REQUEST:
                _end(1, f"{reason} once more: ends at once, without a checkpoint")


def _end(status: int, line: str) -> None:
    _say(line)
    os._exit(status)


def listen(*, parent: int | None, patience: float = _ORPHANED) -> StopRequest:
    """Listen for signals from now on; return the stop request that they set. The main thread calls it, once.

    `parent`: the end of this process is a request too, and the caller then ends within `patience` seconds.
    """
    stop = StopRequest()
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    for number in SIGNALS:
        # What was ignored from the beginning stays so: SIGHUP by nohup, SIGINT by a shell's `&` in a script.
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _do_nothing)  # a handler of Python's, so that the interpreter writes to the pipe
    threading.Thread(target=_watch, args=(stop, read_end, parent, patience), name="signals", daemon=True).start()
    return stop


def _watch(stop: StopRequest, read_end: int, parent: int | None, patience: float) -> None:
    orphaned = 0.0
    while True:
        if select.select([read_end], [], [], _LOOK_AT_PARENT)[0]:
            for number in os.read(read_end, 64):
                if number in SIGNALS:
                    stop.ask(f"{signal.Signals(number).name} received", warning=number in _WARNINGS)
        if parent is None or os.getppid() == parent:
            continue
        orphaned = orphaned or time.monotonic()
        if not stop.requested:
            stop.ask("torchrun is gone", warning=True)
        if time.monotonic() - orphaned > patience:
            _say(f"torchrun has been gone for {patience:.0f} s: ends without a checkpoint")
            os._exit(1)


def _do_nothing(*_: object) -> None:
    """Handle a signal by leaving it to the thread."""


def _say(line: str) -> None:
    # Not print: the main thread may hold the lock of sys.stderr.
    os.write(2, f"{started_as('train')} (rank {os.environ.get('RANK', '0')}): {line}\n".encode())


def under_torchrun() -> bool:
    """Return whether torchrun started this process and is its parent."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def how_it_ended(process: BaseProcess, timeout: float | None = None) -> str:
    """Return "was ended by SIGSEGV" or "ended with status 1"; "was lost" if no status is available.

    Waits up to `timeout` seconds for the end of the process (None: until it ends).

    The kernel reports the exit status of a process only once. Each thread that starts a process collects the status of
    all ended ones (`multiprocessing.process._cleanup`) and stores it a moment later. Until then `join` returns at once,
    and `exitcode` is None.
    """
    process.join(timeout)
    patience = time.monotonic() + _MOMENT
    while (status := process.exitcode) is None:
        if time.monotonic() > patience:
            return "was lost"
        time.sleep(0.001)
    return f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
