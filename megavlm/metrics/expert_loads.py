"""Write how full each expert was to RUN_DIR/expert_loads.jsonl, for `megavlm report`.

A line per recorded step: its iteration, and for each layer with experts the tokens of each expert over their mean.
"""

from __future__ import annotations

from pathlib import Path

from megavlm.metrics.callback import Callback, StepEnd, Stop
from megavlm.metrics.sinks import JsonlSink

FILE = "expert_loads.jsonl"
_MOST_LINES = 200  # of a run, however long: a line of a large model is as long as a hundred of metrics.jsonl


class ExpertLoadsSink(Callback):
    """Writes a line every `train_iters` / 200 steps."""

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
