"""What a user could name with --callback, and a way to run it in a pool."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megavlm.errors import Stopped, UserError
from megavlm.metrics.callback import Callback, Saved, Start, StepEnd, Stop


class Diary(Callback):
    """Writes down what it is told, in RUN_DIR/diary.jsonl."""

    def on_start(self, start: Start) -> None:
        self._path = start.run_dir / "diary.jsonl"
        self._write(["start", start.iteration, start.train_iters, start.world])

    def on_step_begin(self, iteration: int) -> None:
        self._write(["begin", iteration])

    def on_step_end(self, step: StepEnd) -> None:
        self._write(["step", step.iteration, sorted(step.record)])

    def on_save(self, saved: Saved) -> None:
        self._write(["save", saved.iteration, saved.folder.name])

    def on_stop(self, stop: Stop) -> None:
        self._write(["stop", stop.iteration, stop.state, stop.reason])

    def _write(self, entry: list[Any]) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(entry) + "\n")


class Impatient(Diary):
    """Asks for a stop after the second step."""

    def on_step_end(self, step: StepEnd) -> None:
        super().on_step_end(step)
        if step.iteration == 2:
            raise Stopped("two steps are enough")


class Broken(Callback):
    """Has a mistake that shows at the second step."""

    def on_step_end(self, step: StepEnd) -> None:
        if step.iteration >= 2:
            raise ZeroDivisionError("a user's mistake")


class BrokenAtLast(Callback):
    """Has a mistake that shows after the last step."""

    def on_step_end(self, step: StepEnd) -> None:
        if step.iteration == 3:
            raise KeyError("no such\nmetric")


class NoCallback:
    """Is not derived from Callback."""


class Unmakeable(Callback):
    def __init__(self) -> None:
        raise RuntimeError("needs a file that is not there")


def train_to_error(argv: Sequence[str], run_dir: str) -> tuple[str, str] | None:
    """Train, and return the kind and the text of the error that ends the run on this rank."""
    from tests.support.training import train

    try:
        train(argv, run_dir)
    except (Stopped, UserError) as error:
        return type(error).__name__, str(error)
    return None


def diary(run_dir: Path) -> list[list[Any]]:
    return [json.loads(line) for line in (run_dir / "diary.jsonl").read_text().splitlines()]
