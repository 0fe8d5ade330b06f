"""Write the metrics of each iteration and samples to TensorBoard."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megavlm.errors import UserError
from megavlm.metrics.callback import Callback, Generation, Samples, StepEnd, Stop
from megavlm.metrics.tags import tagged


class TensorBoardSink(Callback):
    """Writes TensorBoard event files: one chart per number, under its tag, and samples with their pictures."""

    def __init__(self, directory: Path, *, purge_step: int | None = None) -> None:
        """Write to `directory`; TensorBoard ignores points of earlier event files from iteration `purge_step` on.

        A run that resumes at iteration k passes k + 1. Raises UserError if the directory cannot be written.
        """
        from torch.utils.tensorboard import SummaryWriter  # the import takes a second, and only one rank needs it

        self._pictures_written = False
        try:
            self._writer: Any = SummaryWriter(str(directory), purge_step=purge_step, flush_secs=30)
        except OSError as error:
            what = f"{directory} cannot be written ({error.strerror})"
            raise UserError(f"{what}: move it away, or go on with --no-tensorboard") from error

    def on_step_end(self, step: StepEnd) -> None:
        def add(writer: Any) -> None:
            for tag, number in tagged(step.record).items():
                writer.add_scalar(tag, number, step.iteration)

        self._write(add)

    def on_samples(self, samples: Samples) -> None:
        def add(writer: Any) -> None:
            for number, each in enumerate(samples.generations):
                writer.add_text(f"samples/{number}", _told(each), samples.iteration)
                for place, image in enumerate(() if self._pictures_written else each.images):
                    writer.add_image(f"samples/{number}/{place}", image, samples.iteration, dataformats="HWC")

        self._write(add)
        self._pictures_written = True  # they are always the same

    def on_stop(self, stop: Stop) -> None:
        self._write(lambda writer: writer.close())

    def _write(self, call: Callable[[Any], object]) -> None:
        """Call the writer; after an error of its thread, go on without."""
        if self._writer is None:
            return
        try:
            call(self._writer)
        except OSError as error:
            self._writer = None
            print(
                f"warning: TensorBoard's files cannot be written ({error.strerror or error}): "
                "the run goes on without charts; metrics.jsonl has the same figures",
                file=sys.stderr,
                flush=True,
            )


def _told(said: Generation) -> str:
    """Return a sample as Markdown in which nothing that it says is taken for Markdown."""
    parts = {said.label or "prompt": said.prompt, "answer": said.answer, "reference": said.reference}
    blocks = {name: textwrap.indent(text or " ", "    ", lambda line: True) for name, text in parts.items()}
    return "\n\n".join(f"{name}:\n\n{block}" for name, block in blocks.items())
