"""Build a rank's chunks, their optimizer and their schedules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from megavlm.arch.objectives import objective_of
from megavlm.arch.plan import Plan
from megavlm.backend import Backend
from megavlm.backend.host_copies import HostCopies
from megavlm.config.derived import offloaded, sequence_multiple, sequence_parallel, shards_gradients
from megavlm.config.lora_config import clipped_parts
from megavlm.config.schema import Config
from megavlm.model.offload import Offload
from megavlm.model.vlm import HoldsWeights, VLMChunk
from megavlm.model.weights import initialize
from megavlm.optim.build_optimizer import build_optimizer, chain_optimizers
from megavlm.optim.chained import LearningRate, MeanGradientOptimizer
from megavlm.optim.data_parallel import count_waits, shard_chunks, with_whole_gradients, wrap_chunks
from megavlm.optim.fully_sharded import on_meta
from megavlm.optim.qk_clip import HeadLogits
from megavlm.parallel.groups import Groups, encoder_groups
from megavlm.parallel.rendezvous import of_all_ranks
from megavlm.pipeline.colocated import ColocatedEncoder
from megavlm.pipeline.encoder import EncoderRunner, encoder_config
from megavlm.pipeline.feature_cache import FeatureCache, encoder_hash
from megavlm.pipeline.gradient_cache import GradientCache
from megavlm.pipeline.schedule import Schedule, finalize_gradients, pipeline_config
from megavlm.precision.fp8_state import plain_weights
from megavlm.resilience.phases import Phases
from megavlm.train.engine import Engine

WeightInit = Callable[[Sequence[HoldsWeights]], None]  # sets the weights of this rank's chunks; every rank calls it


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

    `phases` records the phases of steps.
    """
    pipeline = pipeline_config(config, plan.dims)
    shards = shards_gradients(config)
    place = partial(on_meta if shards else nn.Module.to, device=backend.device)
    bare = [
        VLMChunk(config, plan, index, vocab_size=vocab_size, groups=groups, pipeline=pipeline, place=place)
        for index in plan.dims.chunks_of(groups.coords.pp)
    ]
    encoder = _EncoderModel.of(config, plan, groups, vocab_size=vocab_size, backend=backend)
    every = [*bare, *([encoder.chunk] if encoder else [])]
    if "activations" in offloaded(config):
        offload = Offload(HostCopies(backend.device))
        for chunk in every:
            chunk.offload = offload
    sharded = shard_chunks(bare, config, groups, backend.device) if shards else []
    with plain_weights(every):
        begin = [*(sharded or bare), *([encoder.chunk] if encoder else [])]
        if weights is not None:
            weights(begin)
        else:
            for each in begin:
                initialize(each, config, vocab_size=vocab_size)
    for each in sharded:
        each.round_weights()
    chunks = sharded or wrap_chunks(bare, config, groups)
    optimizer = build_optimizer(config, chunks, groups)
    colocated = None
    if encoder is not None:
        colocated, optimizer = encoder.connect(config, groups, optimizer)
    schedule = Schedule(
        chunks,
        config=pipeline,
        model=config.model,
        groups=groups,
        backend=backend,
        num_sources=num_sources,
        colocated=colocated,
        cache=_gradient_cache(config, groups),
        phases=phases,
    )
    _connect(schedule, config, optimizer)
    clips = bool(clipped_parts(config))
    return Engine(
        chunks=chunks,
        schedule=schedule,
        optimizer=optimizer,
        scheduler=LearningRate(config.optimizer, optimizer),
        groups=groups,
        head_logits=HeadLogits(every, config, backend.device) if clips else None,
        evaluates_averages=config.evaluation.eval_ema,
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
        )
        whole = Plan(dims=spread.dims, chunks=(plan.encoder,))
        pipeline = pipeline_config(alone, spread.dims)
        chunk = VLMChunk(alone, whole, 0, vocab_size=vocab_size, groups=spread, pipeline=pipeline)
        return cls(alone, spread, chunk.to(backend.device))

    def connect(self, config: Config, groups: Groups, optimizer: Any) -> tuple[ColocatedEncoder, Any]:
        """Return the encoder for steps, and the optimizer, chained with the encoder's if the encoder is trained.

        A frozen encoder has no gradient buffers and no optimizer state.
        """
        encoder = EncoderRunner(self.chunk, config, self.groups, cache=_feature_cache(config, self.chunk, self.groups))
        if encoder.trained:
            wrapped = wrap_chunks([self.chunk], self.config, self.groups)
            encoder = EncoderRunner(wrapped[0], config, self.groups)
            optimizer = chain_optimizers(optimizer, build_optimizer(with_whole_gradients(config), wrapped, self.groups))
        return ColocatedEncoder(encoder, config, groups), optimizer


def _gradient_cache(config: Config, groups: Groups) -> GradientCache | None:
    """Return the gradient cache of an objective that embeds texts; None for all other objectives."""
    if not objective_of(config.model).embeds:
        return None
    model = config.model
    dropout = (model.hidden_dropout, model.attention_dropout, config.lora.dropout)
    return GradientCache(model, groups, draws=max(dropout) > 0)


def _feature_cache(config: Config, chunk: VLMChunk, groups: Groups) -> FeatureCache | None:
    folder = config.placement.vision_cache
    if folder is None:
        return None
    model = config.model
    known = {"vision": model.vision, "projector": model.projector, "precision": config.precision.dtype}
    known |= {"audio": model.audio} if model.audio.num_layers else {}
    weights = encoder_hash(chunk.named_parameters(), known)
    if groups.dims.tp > 1:  # all shards' hashes: another TP rounds differently and needs other entries
        weights = b"".join(of_all_ranks(weights, groups.tp))
    size = int(config.placement.vision_cache_size * 2**30)
    return FeatureCache(Path(folder), size=size, encoder=weights, writers=groups.dims.dp)


def _connect(schedule: Schedule, config: Config, optimizer: MeanGradientOptimizer) -> None:
    """Set the callbacks with which passes scale losses, reduce gradients and gather parameters."""
    pipeline, chunks = schedule.config, schedule.chunks
    count_waits(chunks, schedule.phases)
    pipeline.grad_scale_func = optimizer.scale_loss
    pipeline.finalize_model_grads_func = partial(
        finalize_gradients,
        groups=schedule.groups,
        colocated=schedule.colocated,
        phases=schedule.phases,
    )
    schedule.walk.overlaps_reduction = bool(config.parallel.overlap_grad_reduce)
    # With one chunk, each bucket begins the next one's gather; those of several chunks begin with the step.
    if config.parallel.overlap_param_gather and len(chunks) > 1:
        pipeline.param_sync_func = [chunk.start_param_sync for chunk in chunks]
