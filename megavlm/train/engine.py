"""Build a rank's model chunks and their optimizer, and run training steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megavlm.backend import Backend
from megavlm.backend.host_copies import host_copies_of
from megavlm.backend.profiler_range import profiler_range
from megavlm.checkpoint.state import Trained
from megavlm.config.derived import sequence_multiple, sequence_parallel
from megavlm.config.schema import Config
from megavlm.data.batch import MicroBatch
from megavlm.model.offload import Offload
from megavlm.model.vlm import VLMChunk
from megavlm.model.weights import initialize
from megavlm.optim.build import (
    build_optimizer,
    build_scheduler,
    chain_optimizers,
    loss_scale,
    with_whole_gradients,
    wrap_chunks,
)
from megavlm.optim.chained import MeanGradientOptimizer
from megavlm.optim.fully_sharded import FullyShardedChunk
from megavlm.optim.param_gather import count_waits, gather_parameters
from megavlm.parallel.groups import Groups, encoder_groups
from megavlm.pipeline.colocated import ColocatedEncoder
from megavlm.pipeline.encoder import EncoderRunner, encoder_config
from megavlm.pipeline.feature_cache import FeatureCache, encoder_hash
from megavlm.pipeline.schedule import Schedule, finalize_gradients, pipeline_config
from megavlm.planner.plan import Plan
from megavlm.precision.fp8_weights import plain_weights
from megavlm.resilience.phases import COMMUNICATION, DATA, OPTIMIZER, OTHER, Phases
from megavlm.train.state_before import StateBeforeStep
from megavlm.train.step_result import StepResult, sum_over_ranks

WeightInit = Callable[[Sequence[VLMChunk]], None]  # sets the weights of this rank's chunks; every rank calls it
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
    scheduler: Any
    groups: Groups
    sequence_multiple: int = 1  # sequence lengths must be multiples of this

    def train_step(
        self,
        batches: Sequence[MicroBatch],
        counters: Callable[[], Sequence[float]] = tuple,
        *,
        upcoming: Sequence[MicroBatch] | None = None,
        judge: Judge = lambda loss, norm: None,
    ) -> StepResult:
        """Run forward, backward and update on this rank's micro-batches of a global batch; return the results.

        `counters` is called once the backward pass is under way; what it returns is summed over all ranks by the
        step's one small all-reduce, which also sums the loss. `upcoming` are the micro-batches of the next step, whose
        images a frozen colocated encoder encodes during this step. If `judge` refuses the step, the run is as if its
        batch had been left out.
        """
        if upcoming is not None and self.schedule.colocated is not None:
            self.schedule.colocated.prefetch(upcoming)
        before = StateBeforeStep.of(self.optimizer)
        self.optimizer.zero_grad()
        totals = self.schedule.train(batches)
        self.scheduler.step(increment=1)
        scale = loss_scale(self.optimizer)  # the step may change it
        self.schedule.phases.enter(OPTIMIZER)
        with profiler_range("optimizer"):
            squared_norm = self.optimizer.squared_norm()
            self.schedule.phases.enter(DATA, "next step")
            counted = counters()
            self.schedule.phases.enter(COMMUNICATION, "sums of the step")
            sums = sum_over_ranks(totals, squared_norm, counted, counts=self.groups.is_first_tp)
            self.schedule.phases.enter(OPTIMIZER)
            norm = None if squared_norm is None else sums.squared_norm**0.5
            mean_norm = None if norm is None else norm / max(sums.tokens, 1.0)
            loss = sums.loss / max(sums.tokens, 1.0)
            refused = judge(loss, mean_norm)
            if norm is not None and refused is None:
                self.optimizer.update(norm=norm, tokens=sums.tokens)
        self.schedule.phases.enter(OTHER)
        if refused is not None:
            before.restore()
        return StepResult(
            loss=loss,
            trained_tokens=int(sums.tokens),
            grad_norm=mean_norm,
            learning_rate=self.learning_rate(),
            updated=norm is not None and refused is None,
            refused=refused,
            overflowed=norm is None,
            loss_scale=scale,
            source_losses=tuple(s / n if n else math.nan for s, n in zip(*sums.sources, strict=True)),
            counters=sums.counters,
        )

    def leave_out(self, counters: Callable[[], Sequence[float]]) -> StepResult:
        """Let an iteration pass without its batch; only the counters are summed."""
        self.scheduler.step(increment=1)
        totals = self.schedule.no_totals()
        sums = sum_over_ranks(totals, None, counters(), counts=self.groups.is_first_tp)
        return StepResult(
            loss=math.nan,
            trained_tokens=0,
            grad_norm=None,
            learning_rate=self.learning_rate(),
            updated=False,
            refused=None,
            overflowed=False,
            loss_scale=loss_scale(self.optimizer),
            source_losses=(math.nan,) * self.schedule.num_sources,
            counters=sums.counters,
        )

    def learning_rate(self) -> float:
        """Return the current learning rate of parts of the model without a rate of their own (`--lr`)."""
        return self.scheduler.get_lr({"max_lr": self.scheduler.max_lr, "min_lr": self.scheduler.min_lr})

    def evaluating(self, evaluating: bool) -> None:
        """Switch dropout off or on, once updated weights are gathered; all ranks call it."""
        gather_parameters(self.model_chunks)
        for chunk in self.model_chunks:
            chunk.train(not evaluating)

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
        """Return what a checkpoint saves of this rank, once updated weights are gathered; all ranks call it."""
        gather_parameters(self.model_chunks)
        chunks = [
            chunk if isinstance(chunk, FullyShardedChunk) else getattr(chunk, "module", chunk)
            for chunk in self.model_chunks
        ]
        return Trained(chunks=chunks, optimizer=self.optimizer, groups=self.groups)

    @property
    def model_chunks(self) -> list[Any]:
        """Return all chunks of the model that this rank holds: the pipeline's, then the colocated encoder's."""
        colocated = self.schedule.colocated
        return [*self.chunks, *([colocated.encoder.module] if colocated is not None else [])]


def build_engine(
    config: Config,
    plan: Plan,
    groups: Groups,
    *,
    vocab_size: int,
    backend: Backend,
    weights: WeightInit | None = None,
    num_sources: int = 0,
    phases: Phases | None = None,
) -> Engine:
    """Build this rank's chunks, their optimizer and schedules; their weights come from `weights` or the seed.

    `phases` are told what a step does.
    """
    pipeline = pipeline_config(config, plan.dims)
    bare = [
        VLMChunk(config, plan, index, vocab_size=vocab_size, groups=groups, pipeline=pipeline).to(backend.device)
        for index in plan.dims.chunks_of(groups.coords.pp)
    ]
    encoder = _EncoderModel.of(config, plan, groups, vocab_size=vocab_size, backend=backend)
    every = [*bare, *([encoder.chunk] if encoder else [])]
    if "activations" in config.execution.offload:
        offload = Offload(host_copies_of(backend.device))
        for chunk in every:
            chunk.offload = offload
    with plain_weights(every):
        if weights is not None:
            weights(every)
        else:
            for chunk in every:
                initialize(chunk, config, vocab_size=vocab_size)
    chunks = wrap_chunks(bare, config, groups)
    optimizer = build_optimizer(config, chunks, groups)
    colocated = None
    if encoder is not None:
        colocated, optimizer = encoder.connect(config, groups, optimizer)
    schedule = Schedule(
        chunks,
        config=pipeline,
        groups=groups,
        backend=backend,
        num_sources=num_sources,
        colocated=colocated,
        phases=phases,
    )
    _connect(schedule, config, optimizer)
    return Engine(
        chunks=chunks,
        schedule=schedule,
        optimizer=optimizer,
        scheduler=build_scheduler(config, optimizer),
        groups=groups,
        sequence_multiple=sequence_multiple("language", config, tp=groups.dims.tp),
    )


@dataclass(frozen=True)
class _EncoderModel:
    """The colocated encoder as a model of one chunk, with its own configuration and process groups."""

    config: Config
    groups: Groups
    chunk: VLMChunk

    @classmethod
    def of(
        cls, config: Config, plan: Plan, groups: Groups, *, vocab_size: int, backend: Backend
    ) -> _EncoderModel | None:
        if not plan.encoder:
            return None
        alone = with_whole_gradients(encoder_config(config))
        spread = encoder_groups(
            groups,
            tp=plan.vision_tp,
            same_dropout=not sequence_parallel(alone),
            seed=config.train.seed,
            timeout_minutes=config.parallel.distributed_timeout_minutes,
        )
        whole = Plan(dims=spread.dims, chunks=(plan.encoder,))
        pipeline = pipeline_config(alone, spread.dims)
        chunk = VLMChunk(alone, whole, 0, vocab_size=vocab_size, groups=spread, pipeline=pipeline)
        return cls(alone, spread, chunk.to(backend.device))

    def connect(self, config: Config, groups: Groups, optimizer: Any) -> tuple[ColocatedEncoder, Any]:
        """Return the encoder's part of a step, and the optimizer joined with the encoder's if the encoder is trained.

        A frozen encoder has no gradient buffers and no optimizer state.
        """
        encoder = EncoderRunner(self.chunk, config, self.groups, cache=_feature_cache(config, self.chunk, self.groups))
        if encoder.trained:
            wrapped = wrap_chunks([self.chunk], self.config, self.groups)
            encoder = EncoderRunner(wrapped[0], config, self.groups)
            optimizer = chain_optimizers(optimizer, build_optimizer(with_whole_gradients(config), wrapped, self.groups))
        return ColocatedEncoder(encoder, config, groups), optimizer


def _feature_cache(config: Config, chunk: VLMChunk, groups: Groups) -> FeatureCache | None:
    folder = config.placement.vision_cache
    if folder is None:
        return None
    model = config.model
    known = {"vision": model.vision, "projector": model.projector, "precision": config.precision.dtype}
    weights = encoder_hash(chunk.named_parameters(), known)
    if groups.dims.tp > 1:  # all shards' hashes: another TP rounds differently and needs other entries
        hashes: list[Any] = [None] * groups.dims.tp
        dist.all_gather_object(hashes, weights, group=groups.tp)
        weights = b"".join(hashes)
    return FeatureCache(Path(folder), size=int(config.placement.vision_cache_size * 2**30), encoder=weights)


def _connect(schedule: Schedule, config: Config, optimizer: MeanGradientOptimizer) -> None:
    """Set the callbacks by which megatron-core's schedule scales losses, reduces gradients and gathers parameters."""
    pipeline, chunks = schedule.config, schedule.chunks
    count_waits(chunks, schedule.phases)
    pipeline.grad_scale_func = optimizer.scale_loss
    pipeline.finalize_model_grads_func = partial(
        finalize_gradients,
        groups=schedule.groups,
        colocated=schedule.colocated,
        phases=schedule.phases,
    )
    if config.parallel.overlap_grad_reduce:
        pipeline.no_sync_func = schedule.no_sync
    # With one chunk, each bucket begins the next one's gather.
    if config.parallel.overlap_param_gather and len(chunks) > 1:
        pipeline.param_sync_func = [chunk.start_param_sync for chunk in chunks]
