"""Write the metrics of each iteration to `metrics.jsonl` and to TensorBoard, and skipped samples to RUN_DIR/skipped.

A record maps `iteration` (counted from 1) and other names to values, or to values by name; None means unknown. One
rank has the sinks. Iteration k must be logged before its checkpoint is committed: a run that resumes at k then finds
records 1 … k and drops later ones, so that the file equals that of an uninterrupted run.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol, TextIO

from megavlm.data.types import Skipped

Value = float | int | bool | str | None | Mapping[str, float | None]
Record = Mapping[str, Value]


class Sink(Protocol):
    def log(self, record: Record) -> None:
        """Write the metrics of one iteration."""

    def close(self) -> None:
        """Write pending records; `log` must not be called afterwards."""


class JsonlSink:
    """Writes one JSON object per iteration and line, with floats in full precision.

    Each line is passed to the operating system before `log` returns, so that a killed process loses at most the line
    that it was writing. Non-finite floats are written as `NaN`, `Infinity` and `-Infinity`, which Python's json module
    reads but the JSON standard does not have.
    """

    def __init__(self, path: Path, *, resume_iteration: int = 0) -> None:
        """Open `path` and keep its records up to `resume_iteration` (0: truncate the file)."""
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = kept_lines(path.read_bytes(), resume_iteration=resume_iteration) if path.exists() else b""
        self._file = path.open("ab")
        self._file.truncate(len(kept))
        if kept and not kept.endswith(b"\n"):
            self._file.write(b"\n")
            self._file.flush()

    def log(self, record: Record) -> None:
        assert "iteration" in record
        # A single write per line: a line is incomplete only if the process is killed inside the system call.
        self._file.write(json.dumps(dict(record)).encode() + b"\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def kept_lines(content: bytes, *, resume_iteration: int) -> bytes:
    """Return the longest prefix of complete records whose iteration is at most `resume_iteration`.

    Records are in the order of iterations, so that everything after the first later or damaged record was written after
    the checkpoint or is unreliable. A last record without its newline is complete.
    """
    end = 0
    for line in content.splitlines(keepends=True):
        iteration = _iteration_of(line)
        if iteration is None or iteration > resume_iteration:
            break
        end += len(line)
    return content[:end]


def lost_steps(path: Path, *, resume_iteration: int) -> dict[str, Any]:
    """Return for the event `start` how many steps of `path` a run that resumes drops, and when the last of them ended.

    Call it before `JsonlSink` opens the file.
    """
    content = path.read_bytes() if path.exists() else b""
    dropped = content[len(kept_lines(content, resume_iteration=resume_iteration)) :].splitlines()
    found = [record for line in dropped if (record := _record_in(line)) is not None]
    last = found[-1].get("time") if found else None
    return {"lost_steps": len(found) or None, "last_lost": last if isinstance(last, str) else None}


def _iteration_of(line: bytes) -> int | None:
    record = _record_in(line)
    return None if record is None else record["iteration"]


def _record_in(line: bytes) -> dict[str, Any] | None:
    """Return the record in a line of metrics.jsonl; None without one that has an iteration."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):  # not JSON, or not even UTF-8
        return None
    return record if isinstance(record, dict) and isinstance(record.get("iteration"), int) else None


class TensorBoardSink:
    """Writes TensorBoard event files, one chart per metric. Values that are not numbers (None, text) are skipped."""

    def __init__(self, directory: Path, *, purge_step: int | None = None) -> None:
        """Write to `directory`; TensorBoard ignores points of earlier event files from iteration `purge_step` on.

        A run that resumes at iteration k passes k + 1.
        """
        from torch.utils.tensorboard import SummaryWriter  # the import takes a second, and only one rank needs it

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


class SkippedLog:
    """Appends skipped samples with their reasons to a file of JSON lines, created by the first; no path: none."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._file: TextIO | None = None

    def write(self, iteration: int, skipped: Iterable[Skipped]) -> None:
        for skip in skipped:
            if self._path is None:
                return
            if self._file is None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._file = self._path.open("a", encoding="utf-8")
            line = {"iteration": iteration, **vars(skip), "reason": str(skip.reason)}
            self._file.write(json.dumps(line, ensure_ascii=False) + "\n")
            self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
