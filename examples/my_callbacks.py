"""A user's callback: `pretrain_vlm.py … --callback examples.my_callbacks:GoodEnough` in the root of the clone."""

from __future__ import annotations

from megavlm.errors import Stopped
from megavlm.metrics.callback import Callback, Saved, StepEnd


class GoodEnough(Callback):
    """Callback that stops the run, after a checkpoint, once the loss is below 0.1, and reports complete checkpoints."""

    def on_step_end(self, step: StepEnd) -> None:
        loss = step.record["loss"]
        if isinstance(loss, float) and loss < 0.1:
            raise Stopped("the loss is below 0.1")

    def on_save(self, saved: Saved) -> None:
        print(f"{saved.folder} is complete")
