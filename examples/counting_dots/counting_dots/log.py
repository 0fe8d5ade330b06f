"""A callback that reads its own options."""

from __future__ import annotations

from megavlm.metrics.callback import Callback, Start, StepEnd


class DotsLog(Callback):
    """Callback that writes a line to RUN_DIR/dots.log every `dots_log.every` steps."""

    def on_start(self, start: Start) -> None:
        self._path = start.run_dir / "dots.log"
        self._every = start.config.logging.callbacks.dots_log.every

    def on_step_end(self, step: StepEnd) -> None:
        if step.iteration % self._every == 0:
            with self._path.open("a") as file:
                file.write(f"{step.iteration} {step.record['loss']}\n")
