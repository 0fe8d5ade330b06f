"""Record the history of a run: RUN_DIR/events.jsonl has one JSON object per start, stop, save, restart and failure.

Every rank of every attempt appends to the one file, and nothing is ever removed from it: a run that resumes from an
older checkpoint drops metrics, and keeps its events. `metrics.jsonl` says how a model trained, this file says how the
run went. RUN_DIR/status.json has the state of the run for programs that start it again; it is replaced whole each time.
"""

from __future__ import annotations

import fcntl
import json
import os
import sys
import time
from contextlib import ExitStack, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from megavlm.errors import Stopped, UserError
from megavlm.files import open_to_append, replace_file
from megavlm.json_files import read_own
from megavlm.paths import open_regular

FILE = "events.jsonl"
_LONGEST = 2**24  # bytes of a line

# Every kind of event; docs/long-runs.md has a table of what each means.
KINDS = tuple(
    "start started stop finish failure save save_failed upload upload_failed download damage skip mismatch rewind "
    "worker slow hang takeover".split()
)


def record(
    run_dir: Path,
    kind: str,
    *,
    iteration: int | None = None,
    reason: str | None = None,
    seconds: float | None = None,
    **details: Any,
) -> None:
    """Append an event of this rank to RUN_DIR/events.jsonl, with the time, the rank and the attempt.

    `iteration` is the last completed iteration. A value that is None is left out. If the file cannot be written, the
    function prints a line on stderr and raises nothing.
    """
    assert kind in KINDS, f"list the event {kind!r} in KINDS"
    given = {"iteration": iteration, "reason": reason, "seconds": seconds, **details}
    event = {
        "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "kind": kind,
        "attempt": attempt(),
        "rank": int(os.environ.get("RANK", "0")),
        **{name: value for name, value in given.items() if value is not None},
    }
    line = json.dumps(event, ensure_ascii=False, default=str).encode(errors="replace") + b"\n"
    try:
        # One write to a file in append mode: lines of several processes do not mix.
        with open_to_append(run_dir / FILE) as file:
            file.write(line)
    except OSError as error:
        print(f"warning: {run_dir / FILE} cannot be written ({error.strerror}): {kind}", file=sys.stderr, flush=True)


def attempt() -> int:
    """Return how often torchrun has restarted this run's processes; 0 in the first attempt and without torchrun."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def events(run_dir: Path) -> list[dict[str, Any]]:
    """Return the events of a run in the order in which they were written; a line that was cut off is left out."""
    return json_lines(run_dir / FILE)


def json_lines(path: Path) -> list[dict[str, Any]]:
    """Return the JSON objects in the lines of a file, without other lines; [] if the path is no regular file."""
    found = []
    try:
        with open_regular(path) as file:
            while line := file.readline(_LONGEST):  # a longer one comes in pieces, which are left out
                with suppress(ValueError, RecursionError):
                    value = json.loads(line)
                    if isinstance(value, dict):
                        found.append(value)
    except OSError:
        return found
    return found


_STATUS = "status.json"
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
        replace_file(run_dir / _STATUS, json.dumps(status, indent=2) + "\n")


def note_failure(run_dir: Path, error: BaseException) -> None:
    """Write the error that ends the run to status.json and events; only the first error of an attempt is kept."""
    reason = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
    status = error.status if isinstance(error, UserError) else 1
    with ExitStack() as locked:
        with suppress(OSError):  # ranks that fail alike get here together; a few file systems have no locks
            folder = os.open(run_dir, os.O_RDONLY)
            locked.callback(os.close, folder)
            fcntl.flock(folder, fcntl.LOCK_EX)
            locked.callback(fcntl.flock, folder, fcntl.LOCK_UN)
        before = read_status(run_dir)
        if before.get("state") == "failed" and before.get("attempt") == attempt():
            return
        # the number of ranks: only a retry of the same start is refused (`programs/train.py`)
        write_status(run_dir, "failed", reason=reason, exit_status=status, world=int(os.environ.get("WORLD_SIZE", "1")))
        record(run_dir, "failure", reason=reason)


def read_status(run_dir: Path) -> dict[str, Any]:
    """Return the content of status.json; empty where there is none."""
    return read_own(run_dir / _STATUS)


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
