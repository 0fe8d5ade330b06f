"""Refuse at once what torchrun starts again after a mistake in options or data.

torchrun restarts ranks whatever their exit status (`--max-restarts`), and cannot be told not to. What no restart can
mend then ends before anything is imported or built.
"""

from __future__ import annotations

import os
import time
from datetime import datetime
from pathlib import Path

from megavlm.errors import BadNumbers, UserError
from megavlm.resilience.status import read_status


def refuse_retry(run_dir: Path, *, world: int, launched: float) -> None:
    """Raise the UserError that ended an earlier attempt of this launch, with as many ranks, if one did.

    `launched` is the time (of `time.time`) when torchrun started: with the same torchrun, the options are the same.
    """
    status = read_status(run_dir)
    if status.get("state") != "failed" or status.get("exit_status") not in (UserError.status, BadNumbers.status):
        return
    # status.json has whole seconds; an attempt fails much later than a second after torchrun's start
    if status.get("world") != world or _time(status.get("time")) < launched + 1:
        return
    kind = BadNumbers if status["exit_status"] == BadNumbers.status else UserError
    line = f"{status.get('reason')} (not tried again: attempt {status.get('attempt')} of this torchrun ended so)"
    error = kind(line)
    error.wait = 1.0  # nothing is imported or built, so that all ranks get here at once
    raise error


def launch_time() -> float:
    """Return when the parent of this process, torchrun, started, in seconds of `time.time`; infinity if unknown."""
    try:
        ticks = float(Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[19])
        up = float(Path("/proc/uptime").read_text().split()[0])
    except (OSError, IndexError, ValueError):
        return float("inf")
    return time.time() - up + ticks / os.sysconf("SC_CLK_TCK")


def _time(text: object) -> float:
    try:
        return datetime.fromisoformat(str(text)).timestamp()
    except ValueError:
        return 0.0
