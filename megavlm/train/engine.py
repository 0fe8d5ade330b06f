"""`Engine`: the model of one layout and one optimizer step on it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megavlm.backend import Backend
from megavlm.backend.host_copies import host_copies_of
from megavlm.backend.profiler_range import profiler_range
from megavlm.checkpoint.state import Trained
from megavlm.config import sequence_parallel
from megavlm.config.precision_rules import sequence_multiple
from megavlm.config.schema import Config
from megavlm.data.batch import MicroBatch
from megavlm.model.offload import Offload
from megavlm.model.vlm import VLMChunk
from megavlm.model.weights import initialize
from megavlm.optim.build import (
    build_optimizer,
    build_scheduler,
    join_optimizers,
    loss_scale,
    with_whole_gradients,
    wrap_chunks,
)
from megavlm.optim.fully_sharded import FullyShardedChunk
from megavlm.optim.joined import JoinedOptimizer
from megavlm.optim.param_gather import gather_parameters
from megavlm.parallel.groups import Groups, encoder_groups
from megavlm.pipeline.colocated import ColocatedEncoder
from megavlm.pipeline.encoder import EncoderRunner, encoder_config
from megavlm.pipeline.feature_cache import FeatureCache, encoder_hash
from megavlm.pipeline.schedule import Schedule, finalize_gradients, pipeline_config
from megavlm.pipeline.timer_ranges import TimerRanges
from megavlm.planner.plan import Plan
from megavlm.precision.fp8_weights import plain_weights

WeightInit = Callable[[Sequence[VLMChunk]], None]  # sets the weights of this rank's chunks; every rank calls it


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step reports, equal on every rank."""

    loss: float  # mean cross entropy over the trained tokens of the global batch
    trained_tokens: int
    grad_norm: float | None  # before clipping; None where the step was skipped
    learning_rate: float
    updated: bool  # False where the optimizer skipped the step (overflow)
    loss_scale: float | None  # that this step ran with; None but in fp16
    source_losses: tuple[
        float, ...
    ]  # of each data set, nan where it has no trained token; empty where there is but one
    counters: tuple[float, ...]  # the caller's numbers, added up over the ranks that speak for a replica


@dataclass(frozen=True)
class Engine:
    """This rank's chunks (wrapped for data parallelism) with what drives them.

    `chunks` are the pipeline's; a colocated encoder is one more in `parts`.
    """

    chunks: Sequence[Any]
    schedule: Schedule
    optimizer: Any
    scheduler: Any
    groups: Groups
    sequence_multiple: int = 1  # layers take sequences of tokens whose length this divides

    def train_step(
        self,
        batches: Sequence[MicroBatch],
        counters: Sequence[float] = (),
        *,
        upcoming: Sequence[MicroBatch] | None = None,
    ) -> StepResult:
        """Forward, backward and update on one global batch's share of this rank.

        `counters` are numbers of this rank to add up on the way: the one small all-reduce of a step carries them.
        `upcoming` is the next step's share, which a frozen encoder outside the pipeline encodes meanwhile.
        """
        if upcoming is not None and self.schedule.colocated is not None:
            self.schedule.colocated.prefetch(upcoming)
        self.optimizer.zero_grad()
        totals = self.schedule.train(batches)
        self.scheduler.step(increment=1)
        scale = loss_scale(self.optimizer)  # the step may change it
        with profiler_range("optimizer"):
            updated, norm_of_sums, _ = self.optimizer.step()
        totals = totals if self.groups.is_first_tp else torch.zeros_like(totals)
        totals = torch.cat([totals, torch.tensor(counters, dtype=totals.dtype).to(totals.device, non_blocking=True)])
        dist.all_reduce(totals)
        sources = self.schedule.num_sources
        loss_sum, tokens, *rest = totals.tolist()
        sums, counts, summed = rest[:sources], rest[sources : 2 * sources], rest[2 * sources :]
        return StepResult(
            loss=loss_sum / max(tokens, 1.0),
            trained_tokens=int(tokens),
            grad_norm=None if norm_of_sums is None else norm_of_sums / max(tokens, 1.0),
            learning_rate=self.learning_rate(),
            updated=bool(updated),
            loss_scale=scale,
            source_losses=tuple(s / n if n else math.nan for s, n in zip(sums, counts, strict=True)),
            counters=tuple(summed),
        )

    def learning_rate(self) -> float:
        """The rate of modules that have none of their own."""
        return self.scheduler.get_lr({"max_lr": self.scheduler.max_lr, "min_lr": self.scheduler.min_lr})

    def evaluating(self, evaluating: bool) -> None:
        """Switch dropout off (or on again), and begin with the weights of the last step; every rank calls it."""
        gather_parameters(self.parts)
        for chunk in self.parts:
            chunk.train(not evaluating)

    def name_phases(self, micro_batches: int | None) -> None:
        """Name the phases of steps of so many micro-batches for a profiler; None: no longer."""
        phases = None
        if micro_batches is not None:
            phases = TimerRanges(self.groups.dims, rank=self.groups.coords.pp, micro_batches=micro_batches)
        self.schedule.config.timers = phases
        for optimizer in getattr(self.optimizer, "chained_optimizers", ()):
            optimizer.config.timers = phases

    def close(self) -> None:
        """Let the model go: nothing can be trained afterwards.

        megatron-core's gradient hooks and the wrapper that they belong to hold each other through C++, where Python's
        collector does not look. An emptied wrapper keeps neither weights nor process groups and their threads alive.
        """
        for chunk in self.parts:
            vars(chunk).clear()

    def trained(self) -> Trained:
        """Return what checkpoints hold of this rank, with the weights of the last step; every rank calls it."""
        gather_parameters(self.parts)
        chunks = [
            chunk if isinstance(chunk, FullyShardedChunk) else getattr(chunk, "module", chunk) for chunk in self.parts
        ]
        return Trained(chunks=chunks, optimizer=self.optimizer, groups=self.groups)

    @property
    def parts(self) -> list[Any]:
        """All of the model that this rank holds."""
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
) -> Engine:
    """Build this rank's chunks, their optimizer and schedules; their weights come from `weights` or the seed."""
    pipeline = pipeline_config(config, plan.dims)
    bare = [
        VLMChunk(config, plan, index, vocab_size=vocab_size, groups=groups, pipeline=pipeline).to(backend.device)
        for index in plan.dims.chunks_of(groups.coords.pp)
    ]
    apart = _Apart.of(config, plan, groups, vocab_size=vocab_size, backend=backend)
    parts = [*bare, *([apart.chunk] if apart else [])]
    if "activations" in config.execution.offload:
        offload = Offload(host_copies_of(backend.device))
        for chunk in parts:
            chunk.offload = offload
    with plain_weights(parts):
        if weights is not None:
            weights(parts)
        else:
            for chunk in parts:
                initialize(chunk, config, vocab_size=vocab_size)
    chunks = wrap_chunks(bare, config, groups)
    optimizer = build_optimizer(config, chunks, groups)
    colocated = None
    if apart is not None:
        colocated, optimizer = apart.connect(config, groups, optimizer)
    _connect(pipeline, config, chunks, optimizer, groups, colocated)
    return Engine(
        chunks=chunks,
        schedule=Schedule(
            chunks, config=pipeline, groups=groups, backend=backend, num_sources=num_sources, colocated=colocated
        ),
        optimizer=optimizer,
        scheduler=build_scheduler(config, optimizer),
        groups=groups,
        sequence_multiple=sequence_multiple("language", config, tp=groups.dims.tp),
    )


@dataclass(frozen=True)
class _Apart:
    """A colocated encoder: a model of one chunk, with a layout of its own."""

    config: Config
    groups: Groups
    chunk: VLMChunk

    @classmethod
    def of(cls, config: Config, plan: Plan, groups: Groups, *, vocab_size: int, backend: Backend) -> _Apart | None:
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
        """The encoder's place in a step, and the optimizer of all that is trained; a frozen one has neither gradient
        buffers nor optimizer state.
        """
        encoder = EncoderRunner(self.chunk, config, self.groups, cache=_feature_cache(config, self.chunk, self.groups))
        if encoder.trained:
            wrapped = wrap_chunks([self.chunk], self.config, self.groups)
            encoder = EncoderRunner(wrapped[0], config, self.groups)
            optimizer = join_optimizers(optimizer, build_optimizer(with_whole_gradients(config), wrapped, self.groups))
        return ColocatedEncoder(encoder, config, groups), optimizer


def _feature_cache(config: Config, chunk: VLMChunk, groups: Groups) -> FeatureCache | None:
    folder = config.placement.vision_cache
    if folder is None:
        return None
    model = config.model
    known = {"vision": model.vision, "projector": model.projector, "precision": config.precision.dtype}
    weights = encoder_hash(chunk.named_parameters(), known)
    if groups.dims.tp > 1:  # the hash of all parts; another division rounds differently, and has another
        hashes: list[Any] = [None] * groups.dims.tp
        dist.all_gather_object(hashes, weights, group=groups.tp)
        weights = b"".join(hashes)
    return FeatureCache(Path(folder), size=int(config.placement.vision_cache_size * 2**30), encoder=weights)


def _connect(
    pipeline: Any,
    config: Config,
    chunks: Sequence[Any],
    optimizer: JoinedOptimizer,
    groups: Groups,
    colocated: ColocatedEncoder | None,
) -> None:
    """The callbacks through which megatron-core's schedule scales, reduces and gathers."""
    single = len(chunks) == 1
    pipeline.grad_scale_func = optimizer.scale_loss
    pipeline.finalize_model_grads_func = partial(
        finalize_gradients, groups=groups, colocated=colocated, counted=optimizer.expect_sums
    )
    if config.parallel.overlap_grad_reduce:
        pipeline.no_sync_func = chunks[0].no_sync if single else [chunk.no_sync for chunk in chunks]
    if config.parallel.overlap_param_gather and not single:  # with one chunk, each bucket begins the next one's gather
        pipeline.param_sync_func = [chunk.start_param_sync for chunk in chunks]
