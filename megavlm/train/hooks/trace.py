"""Trace some iterations on some ranks, and list the most expensive kernels (`--profile`).

RUN_DIR/profile/rank-N.json.gz opens in https://ui.perfetto.dev or chrome://tracing.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from megavlm.files import open_new, replace_file
from megavlm.metrics.callback import Value
from megavlm.resilience.phases import TRACE
from megavlm.train.hooks.hook import RankHook, Step
from megavlm.train.run import Run

_ROWS = 10


class Trace(RankHook):
    """Profiles the iterations after `--profile-step-start` up to and with `--profile-step-end`."""

    def __init__(self, run: Run) -> None:
        """Prepare a trace, whose table the first rank of `--profile-ranks` prints."""
        rank, options = dist.get_rank(), run.config.logging
        self._engine = run.engine
        self._options = options
        self._traces = options.profile and rank in options.profile_ranks
        self._path = run.run_dir / "profile" / f"rank-{rank}"
        self._say = run.say if self._traces and rank == options.profile_ranks[0] else lambda text: None
        self._profiler: Any = None

    def on_step_begin(self, iteration: int) -> None:
        """Start the trace before its first iteration (counted from 1), or later if the run resumes inside the range."""
        inside = self._options.profile_step_start < iteration <= self._options.profile_step_end
        if not (self._traces and inside):
            return
        if self._profiler is None:
            activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
            self._profiler = profile(activities=activities)
            self._profiler.__enter__()
        self._engine.name_phases(True)

    def measure(self, step: Step) -> Mapping[str, Value]:
        """Write the trace after its last iteration."""
        if self._profiler is not None:
            self._engine.name_phases(False)
            if step.iteration >= self._options.profile_step_end:
                self.leave()
        return {}

    def leave(self) -> None:
        """Stop and write an open trace; without one, do nothing."""
        if self._profiler is None:
            return
        self._engine.schedule.phases.enter(TRACE)  # a million events take minutes
        profiler, self._profiler, self._traces = self._profiler, None, False
        profiler.__exit__(None, None, None)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        open_new(Path(f"{self._path}.json.gz")).close()  # torch would follow a link
        profiler.export_chrome_trace(f"{self._path}.json.gz")
        sort_by = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
        averages = profiler.key_averages()
        averages[:] = [each for each in averages if not each.is_user_annotation]  # our ranges contain the kernels
        text = averages.table(sort_by=sort_by, row_limit=_ROWS, max_name_column_width=90).rstrip()
        replace_file(self._path.with_suffix(".txt"), text + "\n")
        self._say(f"{text}\ntrace: {self._path}.json.gz")
