"""Write the metrics of each iteration to `metrics.jsonl` and the progress line, loads of experts, and skipped samples.

A record maps `iteration` (counted from 1) and other names to values, or to values by name; None means unknown. Only
one rank has the sinks. Iteration k must be logged before its checkpoint is committed: a run that resumes at k then
finds records 1 … k and drops later ones, so that the file equals that of an uninterrupted run.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections import deque
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TextIO

from megavlm.errors import UserError
from megavlm.files import open_to_append, replace_file
from megavlm.inputs.bad_sample import Skipped
from megavlm.metrics.callback import Callback, Record, Saved, StepEnd, Stop, Value
from megavlm.paths import read_bytes

_LARGEST = 2**30  # bytes of metrics.jsonl: a million steps of a kilobyte


class JsonlSink(Callback):
    """Writes one JSON object per iteration and line, with floats in full precision.

    Each line is passed to the operating system before `on_step_end` returns, so that a killed process loses at most the
    line that it was writing; a full disk loses none. Non-finite floats are written as `NaN`, `Infinity` and
    `-Infinity`, which Python's json module reads but the JSON standard does not have.
    """

    def __init__(self, path: Path, *, resume_iteration: int = 0) -> None:
        """Open `path` and keep its records up to `resume_iteration` (0: truncate the file).

        Damaged lines are dropped with a warning. Raises UserError if the file cannot be read and written.
        """
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            content = content_of(path)
            kept, damaged = kept_lines(content, resume_iteration=resume_iteration)
            if damaged:
                print(f"warning: {damaged} lines of {path} are no records, and are left out", flush=True)
            if kept != content:
                replace_file(path, kept)
            self._lines = _Lines(path)
        except OSError as error:
            raise UserError(f"{path} cannot be read and written ({error.strerror or error}): move it away") from error

    def on_step_end(self, step: StepEnd) -> None:
        self.write(step.record)

    def write(self, record: Mapping[str, Any]) -> None:
        """Append a record, which must have the key `iteration`."""
        assert "iteration" in record
        # A single write per line: a line is incomplete only if the process is killed inside the system call.
        self._lines.append(json.dumps(dict(record)).encode() + b"\n")

    def on_save(self, saved: Saved) -> None:
        """Close the file and open it again: a bucket that is mounted as a folder (gcsfuse) has it once it is closed."""
        self._lines.reopen()

    def on_stop(self, stop: Stop) -> None:
        """Write the lines that could not be written before, and close the file."""
        self._lines.close()


class _Lines:
    """Appends lines to a file. Lines that cannot be written (full disk, lost folder) are kept and tried again."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = open_to_append(path)
        self._waiting = b""

    def append(self, line: bytes) -> None:
        """Write the kept lines and this one; warn on stderr when a line has to be kept for the first time."""
        first = not self._waiting
        self._waiting += line
        try:
            while self._waiting:
                self._waiting = self._waiting[self._file.write(self._waiting) :]
        except OSError as error:
            if first:
                print(
                    f"warning: {self._path} cannot be written ({error.strerror}): its lines wait in memory",
                    file=sys.stderr,
                    flush=True,
                )

    def reopen(self) -> None:
        """Close the file and open it again. Raises OSError, and keeps the open file if there is no other."""
        closed, self._file = self._file, open_to_append(self._path)
        closed.close()

    def close(self) -> None:
        self.append(b"")
        self._file.close()


def content_of(path: Path) -> bytes:
    """Return the content of a file, empty if it does not exist. Raises OSError if it is not regular, or too large."""
    try:
        return read_bytes(path, at_most=_LARGEST)
    except FileNotFoundError:
        return b""


def kept_lines(content: bytes, *, resume_iteration: int) -> tuple[bytes, int]:
    """Return the lines up to the first record with an iteration above `resume_iteration`, and the number of damaged
    lines, which are dropped.

    Records are in the order of iterations: lines after a later iteration were written after the checkpoint. The last
    line does not count as damaged: a killed process was writing it. It may be complete but for its newline, which is
    added.
    """
    kept: list[bytes] = []
    damaged = 0
    lines = content.splitlines(keepends=True)
    for number, line in enumerate(lines, start=1):
        iteration = _iteration_of(line)
        if iteration is not None and iteration > resume_iteration:
            break
        if iteration is not None:
            kept.append(line.rstrip(b"\n") + b"\n")
        else:
            damaged += number < len(lines)
    return b"".join(kept), damaged if resume_iteration else 0


def lost_steps(path: Path, *, resume_iteration: int) -> dict[str, Any]:
    """Return the number of steps in `path` that a resumed run repeats, and when the last of them ended, as fields of
    the event `start`; None: no step.
    Call it before `JsonlSink` opens the file.
    """
    try:
        records = [_record_in(line) for line in content_of(path).splitlines()]
    except OSError:  # JsonlSink will say so
        records = []
    dropped = [record for record in records if record is not None and record["iteration"] > resume_iteration]
    last = dropped[-1].get("time") if dropped else None
    return {"lost_steps": len(dropped) or None, "last_lost": last if isinstance(last, str) else None}


def _iteration_of(line: bytes) -> int | None:
    record = _record_in(line)
    return None if record is None else record["iteration"]


def _record_in(line: bytes) -> dict[str, Any] | None:
    """Return the record in a line of metrics.jsonl; None if the line is not JSON or has no iteration."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):  # not JSON, or not even UTF-8
        return None
    return record if isinstance(record, dict) and isinstance(record.get("iteration"), int) else None


class SkippedLog:
    """Appends skipped samples with their reasons to a file of JSON lines, created on first use; path None: no log."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._lines: _Lines | None = None

    def write(self, iteration: int, skipped: Iterable[Skipped]) -> None:
        for skip in skipped:
            if self._path is None:
                return
            if self._lines is None:
                try:
                    self._path.parent.mkdir(parents=True, exist_ok=True)
                    self._lines = _Lines(self._path)
                except OSError as error:
                    print(f"warning: {self._path} cannot be written ({error.strerror})", file=sys.stderr, flush=True)
                    self._path = None
                    return
            line = {"iteration": iteration, **vars(skip), "reason": str(skip.reason)}
            self._lines.append(json.dumps(line, ensure_ascii=False).encode(errors="replace") + b"\n")

    def close(self) -> None:
        if self._lines is not None:
            self._lines.close()


FILE = "expert_loads.jsonl"
_MOST_LINES = 200  # per run: a line of a large model is as long as a hundred lines of metrics.jsonl


class ExpertLoadsSink(Callback):
    """Writes each expert's load relative to the mean to `expert_loads.jsonl`, every `train_iters` / 200 steps."""

    def __init__(self, run_dir: Path, *, train_iters: int, resume_iteration: int = 0) -> None:
        self._every = max(1, train_iters // _MOST_LINES)
        self._lines = JsonlSink(run_dir / FILE, resume_iteration=resume_iteration)

    def on_step_end(self, step: StepEnd) -> None:
        if step.expert_loads and step.iteration % self._every == 0:
            relative = {}
            for layer, tokens in step.expert_loads.items():
                mean = sum(tokens) / len(tokens) or 1.0
                relative[f"layers.{layer}"] = [round(each / mean, 3) for each in tokens]
            self._lines.write({"iteration": step.iteration, **relative})

    def on_stop(self, stop: Stop) -> None:
        self._lines.on_stop(stop)


_WINDOW = 50  # steps whose median time gives the ETA: enough to be stable, few enough to follow changes


class ProgressLine(Callback):
    """Prints a line every `log_interval` steps, and after the last.

    The ETA is the median of the last step times, multiplied by the number of remaining iterations, so that one slow
    step (warm-up, a save, an evaluation) does not change it.
    """

    def __init__(self, total_iterations: int, stream: TextIO, *, log_interval: int = 1) -> None:
        self._total, self._stream, self._interval = total_iterations, stream, log_interval
        self._step_times: deque[float] = deque(maxlen=_WINDOW)
        self._skipped = 0.0

    def on_step_end(self, step: StepEnd) -> None:
        """Print an iteration, with the number of samples skipped since the start. The record has `iteration`; optional
        are `epoch`, `loss`, `reward_margin`, `reward_accuracy`, `grad_norm`, `learning_rate`, `tokens_per_second`,
        `step_time_s`, `skipped_samples` and `slow` (a text about a slow rank)."""
        record, iteration = step.record, step.iteration
        step_time = record.get("step_time_s")
        if isinstance(step_time, float):
            self._step_times.append(step_time)
        if isinstance(skipped := record.get("skipped_samples"), int):
            self._skipped += skipped
        if iteration % self._interval == 0 or iteration == self._total:
            self.message(self._format(iteration, record))

    def message(self, text: str) -> None:
        """Print a line."""
        self._stream.write(text + "\n")
        self._stream.flush()

    def _format(self, iteration: int, record: Record) -> str:
        parts = [
            f"iteration {iteration:>{len(str(self._total))}}/{self._total}",
            _part("epoch {:.2f}", record.get("epoch")),
            _part("loss {:.4f}", record.get("loss")),
            _part("margin {:.3f}", record.get("reward_margin")),
            _part(
                "{:.0%} of answers right" if "chosen_share" in record else "{:.0%} of pairs right",
                record.get("reward_accuracy"),
            ),
            _part("grad norm {:.3f}", record.get("grad_norm")),
            _part("lr {:.2e}", record.get("learning_rate")),
            _part("{:,.0f} tokens/s", record.get("tokens_per_second")),
            _part("step {:.3f} s", record.get("step_time_s")),
            _part("{:,.0f} skipped", self._skipped or None),
        ]
        if isinstance(slow := record.get("slow"), str):
            parts.append(slow)
        if self._step_times:
            remaining = max(0, self._total - iteration)
            parts.append(f"ETA {duration(statistics.median(self._step_times) * remaining)}")
        return " | ".join(part for part in parts if part)


def _part(template: str, value: Value) -> str:
    return template.format(value) if isinstance(value, float | int) else ""


def duration(seconds: float) -> str:
    """Return seconds as "0:42", "12:05", "3:07:00" or "2 d 4:00:00"."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days} d {hour}:{minute:02}:{second:02}"
    if hours:
        return f"{hours}:{minute:02}:{second:02}"
    return f"{minute}:{second:02}"
