"""Define `Run`, all objects of a training run on this rank. `build.py` creates it, and `loop.close` closes it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megavlm.arch.plan import Plan
from megavlm.backend import Backend
from megavlm.checkpoint.saving import Saver
from megavlm.checkpoint.state import Position
from megavlm.config.schema import Config
from megavlm.data.loader import DataLoader
from megavlm.data.source import HeldOutPrompt, Source
from megavlm.metrics.sinks import ProgressLine, SkippedLog
from megavlm.resilience.lock import RunLock
from megavlm.train.engine import Engine
from megavlm.train.hooks.hook import Callbacks
from megavlm.train.hooks.watch import Watch
from megavlm.train.uploads import Uploads


@dataclass(frozen=True)
class Run:
    """All objects of a training run on this rank."""

    config: Config
    plan: Plan
    backend: Backend
    source: Source
    data_loader: DataLoader
    validation_loader: DataLoader | None  # None without validation samples
    prompts: tuple[HeldOutPrompt, ...]  # of --sample-interval
    engine: Engine
    position: Position  # what is already done
    run_dir: Path
    progress: ProgressLine | None  # on rank 0
    callbacks: Callbacks  # empty but on rank 0
    skipped: SkippedLog  # writes on ranks that read data
    saver: Saver | None  # None with --no-save
    uploads: Uploads | None  # None without --checkpoint-dir
    data_identity: dict[str, Any]  # what a place in the data depends on
    lock: RunLock  # held by rank 0: nobody else writes to the run folder
    watch: Watch

    def say(self, text: str) -> None:
        """Print a line, on rank 0."""
        if self.progress is not None:
            self.progress.message(text)
