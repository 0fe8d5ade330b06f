"""Record the history of a run: RUN_DIR/events.jsonl has one JSON object per start, stop, save, restart and failure.

Every rank of every attempt appends to the one file, and nothing is ever removed from it: a run that resumes from an
older checkpoint drops metrics, and keeps its events. `metrics.jsonl` says how a model trained, this file says how the
run went.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from megavlm.files import open_to_append
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
