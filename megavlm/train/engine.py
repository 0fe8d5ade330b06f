"""Run training steps on a rank's chunks: forward, backward and update. A refused update counts as a batch left out."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from megavlm.backend.accelerator import profiler_range
from megavlm.checkpoint.state import Trained
from megavlm.inputs.batch import MicroBatch
from megavlm.optim.build_optimizer import loss_scale
from megavlm.optim.chained import LearningRate
from megavlm.optim.data_parallel import gather_parameters
from megavlm.optim.master_weights import averaged
from megavlm.optim.qk_clip import HeadLogits
from megavlm.optim.slow_links import forget_errors
from megavlm.parallel.groups import Groups, random_states, set_random_states
from megavlm.pipeline.schedule import Schedule
from megavlm.precision.fp8_state import histories, history_of
from megavlm.resilience.phases import COMMUNICATION, OPTIMIZER, OTHER
from megavlm.train.step_result import StepResult, sum_over_ranks, update_biases


def _histories(chunks: Sequence[Any]) -> dict[str, Tensor]:
    """Return the histories' tensors by name; modules are searched only with delayed scaling."""
    scaled = [chunk for chunk in chunks if history_of(getattr(chunk, "module", chunk).run_config) is not None]
    return {name: tensor for chunk in scaled for name, tensor in histories(chunk).items()}


@dataclass(frozen=True)
class StateBeforeStep:
    """Random states, FP8 histories, and fp16's loss scale with its counters; copying does not wait for the device."""

    chunks: Sequence[Any]
    random: dict[str, Any]
    histories: dict[str, Tensor]  # of delayed scaling
    scalers: list[tuple[Any, dict[str, Any]]]

    @classmethod
    def of(cls, chunks: Sequence[Any], optimizer: Any) -> StateBeforeStep:
        """Return a copy of the current state; histories are copied in one kernel launch."""
        histories = _histories(chunks)
        copies = [torch.empty_like(each) for each in histories.values()]
        if copies:
            torch._foreach_copy_(copies, list(histories.values()))
        found = [getattr(part, "grad_scaler", None) for part in optimizer.chained_optimizers]
        scalers = [(scaler, scaler.state_dict()) for scaler in found if scaler is not None]
        return cls(chunks, random_states(), dict(zip(histories, copies, strict=True)), scalers)

    def restore(self) -> None:
        """Set the random generators, the histories and the loss scale to the kept state; histories that were created
        since get their initial values.
        """
        set_random_states(self.random)
        for name, tensor in _histories(self.chunks).items():
            if name in self.histories:
                tensor.copy_(self.histories[name])
            else:
                tensor.fill_(1.0 if name.endswith(".scale") else 0.0)
        for scaler, state in self.scalers:
            scaler.load_state_dict(state)


# From loss and gradient norm (None: fp16 overflowed) to the reason why a step must not change the weights, if any.
Judge = Callable[[float, float | None], str | None]


@dataclass(frozen=True)
class Engine:
    """This rank's chunks, wrapped for data parallelism, with their schedule, optimizer and learning-rate schedule.

    `chunks` are the pipeline's; `model_chunks` also has the colocated encoder.
    """

    chunks: Sequence[Any]
    schedule: Schedule
    optimizer: Any
    scheduler: LearningRate
    groups: Groups
    head_logits: HeadLogits | None = None  # with `--qk-clip`
    sequence_multiple: int = 1  # sequence lengths must be multiples of this
    evaluates_averages: bool = False  # evaluations use averaged weights (`evaluation.eval_ema`)

    def train_step(
        self,
        batches: Sequence[MicroBatch],
        counters: Callable[[], Sequence[float]] = tuple,
        *,
        upcoming: Sequence[MicroBatch] | None = None,
        judge: Judge = lambda loss, norm: None,
    ) -> StepResult:
        """Run forward, backward and update on this rank's micro-batches of a global batch; return the results.

        `counters` is called once the backward pass is under way; its values are summed over all ranks by the
        step's one small all-reduce, which also sums the loss. `upcoming` are the micro-batches of the next step, whose
        images a frozen colocated encoder encodes during this step. If `judge` refuses the step, the run is as if its
        batch had been left out.
        """
        if upcoming is not None and self.schedule.colocated is not None:
            self.schedule.colocated.prefetch(upcoming)
        before = StateBeforeStep.of(self.model_chunks, self.optimizer)
        self.optimizer.zero_grad()
        if self.head_logits is not None:
            self.head_logits.clear()
        totals = self.schedule.train(batches)
        self.scheduler.step(increment=1)
        scale = loss_scale(self.optimizer)  # the step may change it
        phases = self.schedule.phases
        phases.enter(OPTIMIZER)
        with profiler_range("optimizer"):
            squared_norm = self.optimizer.squared_norm()
            phases.enter(COMMUNICATION, "sums of the step")
            logits = None if self.head_logits is None else self.head_logits.over_ranks()
            result, norm = self._sums(totals, squared_norm, counters, tallies=self.schedule.tallies(), logits=logits)
            phases.enter(OPTIMIZER)
            refused = judge(result.loss, result.grad_norm)
            if norm is not None and refused is None:
                self.optimizer.update(norm=norm, tokens=result.trained_tokens, logits=logits)
                update_biases(self.schedule.routers, result.expert_loads)
        phases.enter(OTHER)
        if refused is not None:
            before.restore()
            forget_errors(self.model_chunks)
        return replace(
            result,
            learning_rate=self.learning_rate(),
            updated=norm is not None and refused is None,
            refused=refused,
            overflowed=norm is None,
            loss_scale=scale,
        )

    def leave_out(self, counters: Callable[[], Sequence[float]]) -> StepResult:
        """Skip the batch of an iteration: advance the learning rate, clear compression residuals, sum the counters."""
        self.scheduler.step(increment=1)
        forget_errors(self.model_chunks)
        result, _ = self._sums(self.schedule.no_totals(), None, counters)
        return replace(result, loss=math.nan, learning_rate=self.learning_rate(), loss_scale=loss_scale(self.optimizer))

    def _sums(
        self, totals: Tensor, squared_norm: Tensor | None, counters: Callable[[], Sequence[float]], **more: Any
    ) -> tuple[StepResult, float | None]:
        model, counts = self.schedule.model, self.groups.is_first_tp
        return sum_over_ranks(totals, squared_norm, counters(), model=model, counts=counts, **more)

    def learning_rate(self) -> float:
        """Return the current learning rate of parts of the model without a rate of their own (`--lr`)."""
        return self.scheduler.current()

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Return a context for evaluation: no dropout, updated weights gathered; all ranks enter it.

        Random states, FP8 histories and fp16's loss scale are restored afterwards.
        """
        before = StateBeforeStep.of(self.model_chunks, self.optimizer)
        gather_parameters(self.model_chunks)
        for chunk in self.model_chunks:
            chunk.eval()
        try:
            with averaged(self.optimizer, self.model_chunks) if self.evaluates_averages else nullcontext():
                yield
        finally:
            for chunk in self.model_chunks:
                chunk.train()
            before.restore()

    def name_phases(self, labelled: bool) -> None:
        """Label the phases of steps for a profiler, or stop it."""
        self.schedule.timers.traced = labelled
        for optimizer in getattr(self.optimizer, "chained_optimizers", ()):
            optimizer.config.timers = self.schedule.timers if labelled else None

    def close(self) -> None:
        """Free the model; the engine cannot be used afterwards.

        megatron-core's gradient hooks and their DDP wrapper refer to each other through C++, which Python's garbage
        collector does not see. Without its attributes the wrapper keeps no weights and no process groups alive.
        """
        for chunk in self.model_chunks:
            vars(chunk).clear()

    def trained(self) -> Trained:
        """Gather updated weights, and return this rank's state for a checkpoint; all ranks call it."""
        gather_parameters(self.model_chunks)
        return Trained(wrapped=self.model_chunks, optimizer=self.optimizer, groups=self.groups)

    @property
    def model_chunks(self) -> list[Any]:
        """Return all chunks of the model that this rank holds: the pipeline's, then the colocated encoder's."""
        colocated = self.schedule.colocated
        return [*self.chunks, *([colocated.encoder.module] if colocated is not None else [])]
