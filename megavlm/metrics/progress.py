"""The progress line: iteration, loss, throughput and estimated time to the end."""

from __future__ import annotations

import statistics
from collections import deque
from typing import TextIO

from megavlm.metrics.callback import Callback, Record, StepEnd, Value

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
