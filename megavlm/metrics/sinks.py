"""Where the numbers of an iteration go: `metrics.jsonl` for scripts, TensorBoard for people.

A record is a mapping with an `iteration` (counted from 1) and numbers, or numbers by name; None says "not known here".
Sinks live on one rank. Log iteration k before the checkpoint of iteration k is committed: resuming at k then finds
records 1 … k and drops the later ones, so that the file is what a run without interruption would have written.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

Value = float | int | bool | str | None | Mapping[str, float | None]
Record = Mapping[str, Value]


class Sink(Protocol):
    def log(self, record: Record) -> None:
        """Take the numbers of one iteration."""

    def close(self) -> None:
        """Write what is pending. Nothing is logged afterwards."""


class JsonlSink:
    """One JSON object per line and iteration, in full precision: a float reads back as the very same float.

    Each line reaches the operating system before `log` returns, so a killed process loses at most the line that it
    was writing. Floats that are not finite are written `NaN`, `Infinity` and `-Infinity`, as Python's json module
    reads them back (JSON proper has no word for them).
    """

    def __init__(self, path: Path, *, resume_iteration: int = 0) -> None:
        """Open `path`, keeping its records up to `resume_iteration` (0: start the file anew)."""
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = kept_lines(path.read_bytes(), resume_iteration=resume_iteration) if path.exists() else b""
        self._file = path.open("ab")
        self._file.truncate(len(kept))
        if kept and not kept.endswith(b"\n"):
            self._file.write(b"\n")
            self._file.flush()

    def log(self, record: Record) -> None:
        assert "iteration" in record
        # One write of the whole line: a line is torn only if the kill falls inside the system call.
        self._file.write(json.dumps(dict(record)).encode() + b"\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def kept_lines(content: bytes, *, resume_iteration: int) -> bytes:
    """The longest prefix of whole records whose iteration is at most `resume_iteration`.

    Records are written in the order of their iterations, so what follows the first later, torn or damaged one was
    written after the checkpoint or cannot be trusted. A last record that lacks only its newline is whole.
    """
    end = 0
    for line in content.splitlines(keepends=True):
        iteration = _iteration_of(line)
        if iteration is None or iteration > resume_iteration:
            break
        end += len(line)
    return content[:end]


def _iteration_of(line: bytes) -> int | None:
    try:
        record = json.loads(line)
    except ValueError:  # not JSON, or not even UTF-8
        return None
    iteration = record.get("iteration") if isinstance(record, dict) else None
    return iteration if isinstance(iteration, int) else None


class TensorBoardSink:
    """Event files, one chart per number. Values that are no numbers (None, text) have no point in a chart."""

    def __init__(self, directory: Path, *, purge_step: int | None = None) -> None:
        """Write to `directory`; charts drop what earlier event files say from iteration `purge_step` on.

        A run that resumes at iteration k gives k + 1.
        """
        from torch.utils.tensorboard import SummaryWriter  # a second of imports that only one rank needs

        self._writer = SummaryWriter(str(directory), purge_step=purge_step, flush_secs=30)

    def log(self, record: Record) -> None:
        iteration = record["iteration"]
        for name, value in record.items():
            parts = (
                {f"{name}/{part}": each for part, each in value.items()}
                if isinstance(value, Mapping)
                else {name: value}
            )
            for chart, number in parts.items():
                if chart != "iteration" and isinstance(number, float | int):
                    self._writer.add_scalar(chart, number, iteration)

    def close(self) -> None:
        self._writer.close()
