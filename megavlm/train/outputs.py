"""Open what rank 0 writes to while a run trains, and note its start in RUN_DIR/events.jsonl and status.json."""

from __future__ import annotations

import sys
from pathlib import Path

from megavlm.config.schema import Config
from megavlm.metrics.callback import Callback
from megavlm.metrics.expert_loads import ExpertLoadsSink
from megavlm.metrics.progress import ProgressLine
from megavlm.metrics.samples_sink import SamplesSink
from megavlm.metrics.sinks import JsonlSink, lost_steps
from megavlm.metrics.tensorboard import TensorBoardSink
from megavlm.metrics.trackers import check_installed, trackers_of
from megavlm.metrics.user_callbacks import load
from megavlm.resilience import events
from megavlm.resilience.status import write_status

_METRICS = "metrics.jsonl"


def note_start(
    config: Config, run_dir: Path, iteration: int, *, world: int, seconds: float, load_seconds: float
) -> None:
    """Write down that the run goes on after `iteration`, `seconds` after the program began, for `load_seconds` of which
    the checkpoint was read. Call it before `outputs`, which drops the lost steps.
    """
    events.record(
        run_dir,
        "start",
        iteration=iteration,
        world=world,
        seconds=round(seconds, 3),
        load_seconds=round(load_seconds, 3) if iteration else None,
        **lost_steps(run_dir / _METRICS, resume_iteration=iteration),
    )
    write_status(run_dir, "running", iteration=iteration, train_iters=config.train.train_iters)


def callbacks_of(config: Config) -> list[Callback]:
    """Return the user's callbacks. Raises UserError if one cannot be made or a tracker is not installed."""
    check_installed(config.logging.tracker)
    return load(config.logging.callback)


def outputs(config: Config, run_dir: Path, iteration: int) -> tuple[ProgressLine, list[Callback]]:
    """Return the progress line, and all sinks and trackers of metrics, which go on after `iteration`."""
    progress = ProgressLine(config.train.train_iters, sys.stderr, log_interval=config.logging.log_interval)
    sinks: list[Callback] = [progress, JsonlSink(run_dir / _METRICS, resume_iteration=iteration)]
    if config.model.experts.num_experts:
        iters = config.train.train_iters
        sinks.append(ExpertLoadsSink(run_dir, train_iters=iters, resume_iteration=iteration))
    if config.evaluation.sample_interval:
        sinks.append(SamplesSink(run_dir / "samples", resume_iteration=iteration))
    if config.logging.tensorboard:
        sinks.append(TensorBoardSink(run_dir / "tensorboard", purge_step=iteration + 1 if iteration else None))
    return progress, [*sinks, *trackers_of(config, run_dir)]
