"""Write and read the state of a run for programs that start it again: RUN_DIR/status.json, replaced whole each time."""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from megavlm.errors import Stopped, UserError
from megavlm.files import replace_file
from megavlm.json_files import read_own
from megavlm.resilience.events import attempt, record

FILE = "status.json"
_PAUSE = 1.0  # seconds between two checks of a waiting rank
_KEPT = ("iteration", "train_iters", "checkpoint", "world")  # from one state to the next, unless they are given
State = Literal["running", "finished", "stopped", "failed"]
STOPPED = 75  # exit status "stopped by request; the same command continues": EX_TEMPFAIL of sysexits.h
HUNG = 70  # exit status of a run that hung (EX_SOFTWARE of sysexits.h): torchrun starts it again if it may
_EXIT_STATUS = {"finished": 0, "stopped": STOPPED}


def write_status(
    run_dir: Path,
    state: State,
    *,
    iteration: int | None = None,
    reason: str | None = None,
    exit_status: int | None = None,
    **details: Any,
) -> None:
    """Replace RUN_DIR/status.json. The iteration, the number of iterations, the checkpoint and the number of ranks keep
    their values in the file unless given; `reason` and `exit_status` are reset.

    `exit_status` is the status of a rank; finished and stopped runs have a fixed one. A run that was killed leaves the
    state "running" behind.
    """
    before = read_status(run_dir)
    given = {"iteration": iteration, **details}
    status = {
        **{name: before[name] for name in _KEPT if isinstance(before.get(name), int | str)},
        **{name: value for name, value in given.items() if value is not None},
        "state": state,
        "reason": reason,
        "exit_status": _EXIT_STATUS.get(state, exit_status),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "attempt": attempt(),
    }
    with suppress(OSError):  # the run itself will say that its folder cannot be written
        replace_file(run_dir / FILE, json.dumps(status, indent=2) + "\n")


def note_failure(run_dir: Path, error: BaseException) -> None:
    """Write the error that ends the run to status.json and events; only the first error of an attempt is kept."""
    before = read_status(run_dir)
    if before.get("state") == "failed" and before.get("attempt") == attempt():
        return
    reason = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
    status = error.status if isinstance(error, UserError) else 1
    # the number of ranks: `retry.py` refuses the same start only
    write_status(run_dir, "failed", reason=reason, exit_status=status, world=int(os.environ.get("WORLD_SIZE", "1")))
    record(run_dir, "failure", reason=reason)


def read_status(run_dir: Path) -> dict[str, Any]:
    """Return the content of status.json; empty where there is none."""
    return read_own(run_dir / FILE)


def wait_as_spare(run_dir: Path, before: dict[str, Any]) -> None:
    """Wait until the run of the other ranks has finished. Raises Stopped if it was stopped, SystemExit if it failed.

    `before` is the status when this process started, of an earlier run or attempt. A run that is killed writes no
    status: torchrun then ends this process, too.
    """
    while True:
        status = read_status(run_dir)
        if status != before:
            match status.get("state"):
                case "finished":
                    return
                case "stopped":
                    raise Stopped(str(status.get("reason")))
                case "failed":
                    raise SystemExit(1)
        time.sleep(_PAUSE)
