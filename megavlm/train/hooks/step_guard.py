"""Skip or undo steps whose numbers are bad (`--on-spike`), and leave out the batches that the user names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from megavlm.checkpoint import folders, state
from megavlm.errors import BadNumbers
from megavlm.metrics.callback import Value
from megavlm.resilience import events
from megavlm.resilience.bad_steps import BadSteps, iterations
from megavlm.train.culprit import Culprit, find_culprit
from megavlm.train.hooks.hook import RankHook, Step
from megavlm.train.run import Run
from megavlm.train.step_result import StepResult


class StepGuard(RankHook):
    """Judges the steps of a run, and says what follows from a bad one. All ranks come to the same decisions."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._options = run.config.numerics
        self._steps = BadSteps(self._options.spike_factor)
        self._steps.load_state_dict(run.position.bad_steps)
        self._left_out = iterations(self._options.iterations_to_skip)

    def leaves_out(self, iteration: int) -> bool:
        """Return whether the batch of an iteration is not to be trained on."""
        return iteration in self._left_out

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps of the steps that were judged."""
        return self._steps.state_dict()

    def judge(self, loss: float, norm: float | None) -> str | None:
        """Return why the numbers of a step are bad."""
        return self._steps.reason(loss, norm)

    @property
    def trusts_weights(self) -> bool:
        """Return whether the last step's numbers were good: weights that cause bad ones must not be saved."""
        return self._steps.in_a_row == 0

    def measure(self, step: Step) -> Mapping[str, Value]:
        """Count a step; return the number of steps of the whole run that did not change the weights."""
        result = step.result
        if result.updated and result.grad_norm is not None:
            self._steps.good(result.grad_norm)
        elif self._complaint(result):
            self._steps.bad()
        else:
            self._steps.left_out()
        return {"skipped_steps": self._steps.skipped}

    def on_step_end(self, step: Step) -> None:
        """Report a bad step; with --on-spike rewind, go back to a checkpoint. Raises BadNumbers to end the run."""
        iteration, result = step.iteration, step.result
        complaint = self._complaint(result)
        if complaint is None:
            return
        found = Culprit("")
        if result.refused is not None:
            found = find_culprit(self._run, step.data, result)
            complaint = f"{complaint}: {found.where}"
        self.report("skip", iteration, complaint, **found.details)
        in_a_row, most = self._steps.in_a_row, self._options.max_consecutive_skips
        if self._options.on_spike == "stop":
            raise BadNumbers(
                f"iteration {iteration}: {complaint}, and --on-spike is stop; no checkpoint was saved after it"
            )
        if in_a_row >= most:
            raise BadNumbers(
                f"iteration {iteration}: {complaint}; this is bad step {in_a_row} in a row "
                "(numerics.max_consecutive_skips): no checkpoint was saved after the first of them; lower --lr, or "
                "look at the data"
            )
        if iteration == self._run.config.train.train_iters:
            raise BadNumbers(
                f"iteration {iteration}: {complaint}; this is the last step, and no checkpoint was saved after it or "
                f"bad ones before it; lower --lr, or leave its batch out with --iterations-to-skip {iteration}"
            )
        if self._options.on_spike == "rewind":
            self._rewind(iteration)

    def _rewind(self, iteration: int) -> None:
        """Take weights, moments and random states of the newest checkpoint, and go on with the data after this batch.

        The run then is as if the batches since that checkpoint had been left out.
        """
        if self._run.saver is not None:
            self._run.saver.wait()  # the newest checkpoint may still be under way
        newest = folders.newest(self._run.run_dir / "checkpoints") if dist.get_rank() == 0 else None
        dist.broadcast_object_list(agreed := [newest], src=0)
        if (folder := agreed[0]) is None:
            self._run.say("there is no checkpoint yet to go back to: the batch is left out")
            return
        run = self._run
        position = state.load(run.engine.trained(), folder, config=run.config, plan=run.plan)
        self._steps.go_back(position.bad_steps, left_out=iteration - position.iteration)
        self.report("rewind", iteration, f"went back to the weights of {folder}", back_to=position.iteration)

    def report(self, kind: str, iteration: int, reason: str, **details: Any) -> None:
        """Write an event, and say it."""
        if self._run.progress is not None:
            events.record(self._run.run_dir, kind, iteration=iteration, reason=reason, **details)
        self._run.say(f"iteration {iteration}: {reason}" + ("; its batch is left out" if kind == "skip" else ""))

    def _complaint(self, result: StepResult) -> str | None:
        """Return why the numbers of a step are bad, if they are. fp16 looks for its loss scale by overflows."""
        if result.updated or result.refused is not None:
            return result.refused
        smallest = self._run.config.optimizer.min_loss_scale
        if result.overflowed and result.loss_scale is not None and result.loss_scale <= smallest:
            return f"fp16 gradients overflow at the smallest loss scale {result.loss_scale:g}"
        return None
