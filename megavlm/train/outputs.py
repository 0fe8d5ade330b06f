"""Open what rank 0 writes to while a run trains, and note its start in RUN_DIR/events.jsonl and status.json."""

from __future__ import annotations

import sys
from pathlib import Path

from megavlm.config.schema import Config
from megavlm.metrics.progress import ProgressLine
from megavlm.metrics.sinks import JsonlSink, Sink, TensorBoardSink, lost_steps
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


def outputs(config: Config, run_dir: Path, iteration: int) -> tuple[ProgressLine, list[Sink]]:
    """Return the progress line and all sinks of metrics, which go on after `iteration`."""
    progress = ProgressLine(config.train.train_iters, sys.stderr, log_interval=config.logging.log_interval)
    sinks: list[Sink] = [progress, JsonlSink(run_dir / _METRICS, resume_iteration=iteration)]
    if config.logging.tensorboard:
        sinks.append(TensorBoardSink(run_dir / "tensorboard", purge_step=iteration + 1 if iteration else None))
    return progress, sinks
