"""Rules about the layout: divisibility by parallel degrees and shards, and unsupported combinations."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import get_args

from megavlm.arch.connector import Split, connector_of
from megavlm.arch.tensor_split import context_heads, local_heads, share_runs
from megavlm.config.derived import (
    Offloaded,
    has_vision,
    masks_attention,
    offloaded,
    replica_size,
    sequence_parallel,
    shards_gradients,
)
from megavlm.config.lora_config import frozen_parts, parts_of
from megavlm.config.messages import divisors, indivisible, nearest, no_divisor, plain
from megavlm.config.schema import Config
from megavlm.rules import Rule, WorldRule
from megavlm.rules.defaults import is_set, resolve_model
from megavlm.rules.expert_rules import expert_ranks_divide, experts_over_ranks, experts_support


def tensor_parallelism(config: Config) -> Iterator[str]:
    """Refuse widths so small that a rank would hold only padding; other widths that TP does not divide are padded."""
    parallel, model = config.parallel, config.model
    tp, length = parallel.tensor_model_parallel_size, config.train.seq_length
    vision_tp, option = parallel.vision_tensor_model_parallel_size, "--vision-tp"
    if config.placement.encoder == "stages":
        vision_tp, option = tp if has_vision(model) else 1, "--tensor-model-parallel-size"
    audio_tp = vision_tp if model.audio.num_layers else 1
    if model.projector.kind != "linear" and is_set(model.projector, "hidden_size"):
        projector = ("model.projector.hidden_size", model.projector.hidden_size)
    else:
        projector = ("model.language.hidden_size (the width of the projector)", model.language.hidden_size)
    for name, width, of, ranks in (
        ("model.vision.ffn_hidden_size", model.vision.ffn_hidden_size, option, vision_tp),
        ("model.audio.ffn_hidden_size", model.audio.ffn_hidden_size, option, audio_tp),
        ("model.language.ffn_hidden_size", model.language.ffn_hidden_size, "--tensor-model-parallel-size", tp),
        (*projector, option, vision_tp),
    ):
        if not share_runs(width, ranks, ranks - 1):
            yield f"{name} {width} is too small for {of} {ranks}: {nearest(width, ranks)}"
    connector = connector_of(model.projector)
    for leaf, split in connector.splits(resolve_model(model)).items():
        if not _reaches_all(split, vision_tp):
            fits = next(ranks for ranks in range(vision_tp - 1, 0, -1) if _reaches_all(split, ranks))
            yield (
                f"{option} {vision_tp} leaves ranks without a part of {leaf} of --projector-kind {connector.name}: use "
                f"{fits}"
            )
    if parallel.sequence_parallel and tp == 1:
        yield (
            "--sequence-parallel shards over tensor-parallel ranks, but --tensor-model-parallel-size is 1: raise it, "
            "or leave --sequence-parallel out"
        )
    if sequence_parallel(config) and length % tp:
        problem = indivisible("--seq-length", length, "--tensor-model-parallel-size", tp)
        yield f"{problem}, or give --no-sequence-parallel"


def _reaches_all(split: Split, ranks: int) -> bool:
    """Return whether the last of `ranks` ranks holds rows of a split weight, and not only padding."""
    part = split.part(ranks, ranks - 1)
    return part is None or bool(part.runs)


def colocated_encoder(config: Config) -> Iterator[str]:
    """Check that --vision-tp divides a replica, and that features computed ahead or cached do not depend on the time of
    computation: the encoder must be frozen and without dropout. fp16 excludes a trained encoder: its own optimizer
    would detect overflow independently.
    """
    model, placement, ranks = config.model, config.placement, replica_size(config)
    shared = config.parallel.vision_tensor_model_parallel_size
    if placement.encoder == "colocated" and not has_vision(model):
        yield "--placement colocated places a vision encoder, which the model does not have: use --placement stages"
    if ranks % shared:
        yield no_divisor("--vision-tp", shared, f"the {ranks} processes of a model replica (TP × CP × PP)", ranks)
    if shared > 1 and placement.encode_ahead:
        yield (
            f"--encode-ahead runs the encoder concurrently with other communication, but with --vision-tp "
            f"{shared} the encoder communicates itself: leave one of them out"
        )
    if config.precision.dtype == "fp16" and placement.encoder == "colocated" and not _freezes_encoder(config):
        yield (
            "--precision fp16 does not train an encoder with --placement colocated: use --precision bf16, or "
            "--placement stages"
        )
    for option, given in (("--encode-ahead", placement.encode_ahead), ("--vision-cache", placement.vision_cache)):
        if given and not _freezes_encoder(config):
            parts = " ".join(parts_of(config)[:-1])
            yield f"{option} needs a frozen encoder: add --freeze {parts}, or leave it out"
        if given and (model.hidden_dropout or model.attention_dropout):
            yield f"{option} needs features without dropout: set --hidden-dropout and --attention-dropout to 0"


def _freezes_encoder(config: Config) -> bool:
    return {*parts_of(config)} - {"language"} <= {*frozen_parts(config)}


def offload(config: Config) -> Iterator[str]:
    """Check `--offload`. Only optimizer state can be on a disk. Offloaded parameters need ZeRO-3, which gathers weights
    layer by layer, and offloaded optimizer state, because the update runs where the parameters are.
    """
    kinds = []
    for word in config.execution.offload:
        kind, equals, place = word.partition("=")
        kinds.append(kind)
        if kind not in get_args(Offloaded) or (equals and kind != "optimizer"):
            yield f"--offload {plain(word)} is unknown: choose optimizer, activations, parameters or optimizer=nvme:DIR"
        if equals and not (place.startswith("nvme:") and place != "nvme:"):
            yield f"--offload {plain(word)} names no folder: write optimizer=nvme:DIR"
    if len(set(kinds)) < len(kinds):
        yield f"--offload names {kinds[-1]} twice: keep one"
    if "parameters" in offloaded(config) and config.parallel.data_parallel_sharding != "full":
        yield (
            "--offload parameters needs --data-parallel-sharding full, which gathers weights layer by layer: choose it,"
            " or leave parameters out"
        )
    if "parameters" in offloaded(config) and "optimizer" not in offloaded(config):
        yield "--offload parameters needs the optimizer beside them: use --offload optimizer parameters"


def context_parallelism(config: Config) -> Iterator[str]:
    """Check that CP divides the heads or the sequence that ranks exchange; gathered keys do not support masks."""
    parallel, cp = config.parallel, config.parallel.context_parallel_size
    tp, length = parallel.tensor_model_parallel_size, config.train.seq_length
    if parallel.cp_comm_type == "a2a" and (heads := math.gcd(*local_heads(config))) % cp:
        counts = "model.language.num_attention_heads"
        counts += " and model.language.linear_num_value_heads" * bool(config.model.language.linear_attention_layers)
        yield (
            f"--context-parallel-size {cp} does not divide the {heads} query heads that ranks can exchange ({counts}, "
            f"--tensor-model-parallel-size {tp}): set it to {divisors(heads)}, or use --cp-comm-type auto"
        )
    heads = context_heads(config)
    tp = tp if sequence_parallel(config) else 1
    groups = cp // heads
    multiple = math.lcm(cp * tp, 2 * groups if groups > 1 else 1)
    if cp > 1 and length % multiple:
        yield (
            f"--seq-length {length} is not divisible by {multiple}, the parts into which ranks split a sequence "
            f"(--context-parallel-size {cp}{f' × --tensor-model-parallel-size {tp}' if tp > 1 else ''}"
            f"{f', two parts each for {groups} groups that gather keys' if groups > 1 else ''}): "
            f"{nearest(length, multiple)}"
        )
    if heads < cp and masks_attention(config.model.language):
        yield (
            f"--context-parallel-size {cp} gathers keys and values, as only {heads} of the ranks can exchange heads; "
            "that supports no sliding windows and no images that attend both ways: use a --cp that divides the heads "
            "of a rank, with --cp-comm-type a2a"
        )


def pipeline_schedule(config: Config) -> Iterator[str]:
    """Check `--schedule`: interleaving needs several chunks per stage, the other schedules one. ZB-H1 defers weight
    gradients, but ZeRO-2 and 3 would already have reduced the layer's gradients by then.
    """
    parallel = config.parallel
    schedule, vpp = parallel.schedule, parallel.virtual_pipeline_model_parallel_size
    if vpp > 1 and parallel.pipeline_model_parallel_size == 1:
        yield (
            f"--virtual-pipeline-model-parallel-size {vpp} interleaves pipeline stages, but "
            f"--pipeline-model-parallel-size is 1: raise it, or leave --virtual-pipeline-model-parallel-size at 1"
        )
    if schedule is None:
        return
    option = f"--schedule {schedule}"
    if parallel.pipeline_model_parallel_size == 1:
        yield f"{option} orders the passes of pipeline stages, but there is one: use --pp 2, or leave it out"
    if schedule == "interleaved" and vpp == 1:
        yield f"{option} is for several chunks per stage: add --vpp 2, or leave it out"
    if schedule != "interleaved" and vpp > 1:
        yield f"{option} has one chunk per stage, but there are --vpp {vpp}: use --vpp 1, or leave it out"
    if schedule == "zb-h1" and shards_gradients(config):
        yield (
            f"{option} computes weight gradients later than --data-parallel-sharding {parallel.data_parallel_sharding} "
            "reduces them: use --data-parallel-sharding optimizer, or another schedule"
        )


def overlap_of_data_parallelism(config: Config) -> Iterator[str]:
    parallel = config.parallel
    if parallel.overlap_param_gather and parallel.data_parallel_sharding == "none":
        yield "--overlap-param-gather needs --data-parallel-sharding optimizer: without it no parameters are gathered"
    if shards_gradients(config) and (parallel.overlap_grad_reduce or parallel.overlap_param_gather):
        option = "--overlap-grad-reduce" if parallel.overlap_grad_reduce else "--overlap-param-gather"
        yield f"{option} applies to --data-parallel-sharding optimizer or none; the others always overlap: leave it out"
    if parallel.overlap_param_gather and parallel.overlap_grad_reduce is False:
        yield "--overlap-param-gather needs --overlap-grad-reduce: leave --no-overlap-grad-reduce out"
    if parallel.ddp_bucket_size is not None and (parallel.overlap_grad_reduce is False or shards_gradients(config)):
        yield (
            f"parallel.ddp_bucket_size {parallel.ddp_bucket_size} has no effect if gradients are reduced all at once "
            "or per layer: leave it out, or use --overlap-grad-reduce with --data-parallel-sharding optimizer or none"
        )


def shards(config: Config) -> Iterator[str]:
    """Check sizes of shard groups. A secondary shard needs ZeRO-3, which alone gathers weights again in backward
    passes; of size 1 it would be whole weights, as ZeRO-2 has.
    """
    parallel, sharding = config.parallel, config.parallel.data_parallel_sharding
    if config.precision.dtype == "fp16" and shards_gradients(config):
        yield (
            f"--data-parallel-sharding {sharding} does not support the loss scaling that --precision fp16 needs: use "
            "--precision bf16, or --data-parallel-sharding optimizer"
        )
    if parallel.hybrid_shard_size is not None and sharding == "none":
        yield (
            f"--hybrid-shard-size {parallel.hybrid_shard_size} has nothing to shard with --data-parallel-sharding none:"
            " choose another sharding, or leave it out"
        )
    option = f"--secondary-shard-size {parallel.secondary_shard_size}"
    if parallel.secondary_shard_size is not None and sharding != "full":
        yield f"{option} needs --data-parallel-sharding full, which gathers weights again: choose it, or leave it out"
    if parallel.secondary_shard_size == 1:
        yield f"{option} would keep whole weights: use --data-parallel-sharding optimizer_gradients, or leave it out"


def codes_on_links(config: Config) -> Iterator[str]:
    """Check compression of gradients and weights, which replaces collectives of megatron-core or of `fully_shard`."""
    parallel, precision = config.parallel, config.precision
    sharding, size = parallel.data_parallel_sharding, parallel.compress_group_size
    gradients, weights = parallel.compress_gradients != "none", parallel.compress_weights != "none"
    of_weights = f"--compress-weights {parallel.compress_weights}"
    option = f"--compress-gradients {parallel.compress_gradients}" if gradients else of_weights
    if (gradients or weights) and precision.dtype == "fp16":
        yield f"{option} does not support the loss scaling of --precision fp16: use --precision bf16"
    if (gradients or weights) and config.model.experts.num_experts:
        yield f"{option} does not support --num-experts: leave it out"
    if size is not None and (sharding == "none" or parallel.hybrid_shard_size is not None):
        what = "--hybrid-shard-size" if sharding != "none" else "--data-parallel-sharding none"
        yield f"parallel.compress_group_size {size} does not support {what}: leave one out"
    if weights and sharding == "none":
        yield (
            f"{of_weights} has no weights to gather with --data-parallel-sharding none: use optimizer, or leave it out"
        )
    if parallel.grad_reduce_in_bf16 and precision.dtype != "bf16":
        yield "--grad-reduce-in-bf16 reduces gradients in the type of the model: add --precision bf16, or leave it out"
    if parallel.grad_reduce_in_bf16 and gradients:
        yield f"--grad-reduce-in-bf16 and {option} both say how gradients are reduced: leave one out"
    if weights and precision.dtype == "fp32":
        yield f"{of_weights} needs exact master weights beside the gathered ones: use --precision bf16"
    if weights and precision.fp8_param_gather:
        yield f"{of_weights} and --fp8-param-gather both say how weights are gathered: leave one out"


def world_divides(config: Config, world: int) -> Iterator[str]:
    parallel, ranks = config.parallel, replica_size(config)
    if world % ranks:
        cp = parallel.context_parallel_size
        yield (
            f"--tensor-model-parallel-size {parallel.tensor_model_parallel_size} × "
            + (f"--context-parallel-size {cp} × " if cp > 1 else "")
            + f"--pipeline-model-parallel-size {parallel.pipeline_model_parallel_size} needs a multiple of {ranks} "
            f"processes, but there are {world}: change them, or start torchrun with --nproc-per-node {ranks}"
        )


def groups_divide(config: Config, world: int) -> Iterator[str]:
    """Check that group sizes divide the data-parallel ranks, and the secondary shard size the shard group."""
    parallel = config.parallel
    ranks = world // replica_size(config) * parallel.context_parallel_size
    whole = f"the {ranks} data-parallel ranks"
    if parallel.hybrid_shard_size is not None and ranks % parallel.hybrid_shard_size:
        yield no_divisor("--hybrid-shard-size", parallel.hybrid_shard_size, whole, ranks)
    if parallel.compress_group_size is not None and ranks % parallel.compress_group_size:
        yield no_divisor("parallel.compress_group_size", parallel.compress_group_size, whole, ranks)
    shards = parallel.hybrid_shard_size or ranks
    if parallel.secondary_shard_size is not None and shards % parallel.secondary_shard_size:
        yield (
            f"--secondary-shard-size {parallel.secondary_shard_size} does not divide the {shards} ranks that shard: "
            f"use a divisor of {shards}, or leave it out"
        )


def global_batch_divides(config: Config, world: int) -> Iterator[str]:
    """Check that the global batch is whole micro-batches on all replicas; interleaved 1F1B needs a multiple of PP."""
    size, micro, ranks = config.train.global_batch_size, config.train.micro_batch_size, world // replica_size(config)
    pp = config.parallel.pipeline_model_parallel_size
    if size % (micro * ranks):
        yield (
            f"--global-batch-size {size} is not a multiple of --micro-batch-size {micro} × {ranks} data-parallel "
            f"ranks: {nearest(size, micro * ranks)}"
        )
    count = size // (micro * ranks)
    if config.parallel.virtual_pipeline_model_parallel_size > 1 and count % pp:
        yield (
            f"--global-batch-size {size} gives {count} micro-batches, and --virtual-pipeline-model-parallel-size > 1 "
            f"needs a multiple of --pipeline-model-parallel-size {pp}: {nearest(size, micro * ranks * pp)}"
        )


def profiled_ranks_exist(config: Config, world: int) -> Iterator[str]:
    for rank in config.logging.profile_ranks:
        if rank >= world:
            yield f"--profile-ranks {rank} is no rank of {world}: use 0 to {world - 1}"


LAYOUT_RULES: tuple[Rule, ...] = (
    colocated_encoder,
    tensor_parallelism,
    experts_over_ranks,
    experts_support,
    pipeline_schedule,
    context_parallelism,
    overlap_of_data_parallelism,
    shards,
    codes_on_links,
    offload,
)

WORLD_RULES: tuple[WorldRule, ...] = (
    world_divides,
    expert_ranks_divide,
    groups_divide,
    global_batch_divides,
    profiled_ranks_exist,
)
