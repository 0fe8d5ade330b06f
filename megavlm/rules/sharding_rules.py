"""Rules about context parallelism, the order of a pipeline's passes, and data-parallel sharding."""

from __future__ import annotations

import math
from collections.abc import Callable

from megavlm.arch.tensor_split import context_heads, local_heads
from megavlm.config.derived import masks_attention, sequence_parallel, shards_gradients
from megavlm.config.messages import divisors, nearest
from megavlm.config.schema import Config


def heads_divide_over_context(config: Config) -> str | None:
    """Refuse --cp-comm-type a2a where CP does not divide the query heads of a tensor-parallel rank."""
    tp, cp = config.parallel.tensor_model_parallel_size, config.parallel.context_parallel_size
    if config.parallel.cp_comm_type == "a2a" and (heads := local_heads(config)) % cp:
        return (
            f"--context-parallel-size {cp} does not divide the {heads} query heads of a rank "
            f"(model.language.num_attention_heads {config.model.language.num_attention_heads}, "
            f"--tensor-model-parallel-size {tp}): set it to {divisors(heads)}, or use --cp-comm-type auto"
        )
    return None


def sequence_divides_over_context(config: Config) -> str | None:
    cp, length = config.parallel.context_parallel_size, config.train.seq_length
    tp = config.parallel.tensor_model_parallel_size if sequence_parallel(config) else 1
    groups = cp // context_heads(config)
    multiple = math.lcm(cp * tp, 2 * groups if groups > 1 else 1)
    if cp > 1 and length % multiple:
        return (
            f"--seq-length {length} is not divisible by {multiple}, the parts into which ranks split a sequence "
            f"(--context-parallel-size {cp}{f' × --tensor-model-parallel-size {tp}' if tp > 1 else ''}"
            f"{f', two parts each for {groups} groups that gather keys' if groups > 1 else ''}): "
            f"{nearest(length, multiple)}"
        )
    return None


def gathered_keys_have_no_masks(config: Config) -> str | None:
    cp, heads = config.parallel.context_parallel_size, context_heads(config)
    if heads < cp and masks_attention(config.model.language):
        return (
            f"--context-parallel-size {cp} gathers keys and values, as only {heads} of the ranks can exchange heads; "
            "that supports no sliding windows and no images that attend both ways: use a --cp that divides the heads "
            "of a rank, with --cp-comm-type a2a"
        )
    return None


CONTEXT_RULES: tuple[Callable[[Config], str | None], ...] = (
    heads_divide_over_context,
    sequence_divides_over_context,
    gathered_keys_have_no_masks,
)


def schedule_has_stages(config: Config) -> str | None:
    schedule, pp = config.parallel.schedule, config.parallel.pipeline_model_parallel_size
    if schedule is None or pp > 1:
        return None
    return f"--schedule {schedule} orders the passes of pipeline stages, but there is one: use --pp 2, or leave it out"


def schedule_fits_chunks(config: Config) -> str | None:
    """Interleaving is for several chunks per stage; each of the other orders is for one."""
    schedule, vpp = config.parallel.schedule, config.parallel.virtual_pipeline_model_parallel_size
    if schedule == "interleaved" and vpp == 1:
        return "--schedule interleaved is for several chunks per stage: add --vpp 2, or leave it out"
    if schedule not in (None, "interleaved") and vpp > 1:
        return f"--schedule {schedule} has one chunk per stage, but there are --vpp {vpp}: use --vpp 1, or leave it out"
    return None


def split_backward_has_whole_gradients(config: Config) -> str | None:
    """ZeRO-2 and 3 reduce a layer's gradients as its backward pass ends, when those of its weights are not there."""
    if config.parallel.schedule != "zb-h1" or not shards_gradients(config):
        return None
    return (
        f"--schedule zb-h1 computes weight gradients later than --data-parallel-sharding "
        f"{config.parallel.data_parallel_sharding} reduces them: use --data-parallel-sharding optimizer, or another "
        "schedule"
    )


SCHEDULE_RULES: tuple[Callable[[Config], str | None], ...] = (
    schedule_has_stages,
    schedule_fits_chunks,
    split_backward_has_whole_gradients,
)


def param_gather_overlaps_what_exists(config: Config) -> str | None:
    parallel = config.parallel
    if parallel.overlap_param_gather and parallel.data_parallel_sharding == "none":
        return "--overlap-param-gather needs --data-parallel-sharding optimizer: without it no parameters are gathered"
    if shards_gradients(config) and (parallel.overlap_grad_reduce or parallel.overlap_param_gather):
        option = "--overlap-grad-reduce" if parallel.overlap_grad_reduce else "--overlap-param-gather"
        return (
            f"{option} applies to --data-parallel-sharding optimizer or none; the others always overlap: leave it out"
        )
    if parallel.overlap_param_gather and parallel.overlap_grad_reduce is False:
        return "--overlap-param-gather needs --overlap-grad-reduce: leave --no-overlap-grad-reduce out"
    return None


def buckets_are_reduced_apart(config: Config) -> str | None:
    parallel = config.parallel
    if parallel.ddp_bucket_size is not None and (parallel.overlap_grad_reduce is False or shards_gradients(config)):
        return (
            f"parallel.ddp_bucket_size {parallel.ddp_bucket_size} has no effect if gradients are reduced all at once "
            "or per layer: leave it out, or use --overlap-grad-reduce with --data-parallel-sharding optimizer or none"
        )
    return None


def loss_scale_has_an_optimizer(config: Config) -> str | None:
    if config.precision.dtype == "fp16" and shards_gradients(config):
        return (
            f"--data-parallel-sharding {config.parallel.data_parallel_sharding} does not support the loss scaling that "
            "--precision fp16 needs: use --precision bf16, or --data-parallel-sharding optimizer"
        )
    return None


def hybrid_shards_something(config: Config) -> str | None:
    parallel = config.parallel
    if parallel.hybrid_shard_size is None:
        return None
    if parallel.data_parallel_sharding == "none":
        return (
            f"--hybrid-shard-size {parallel.hybrid_shard_size} has nothing to shard with --data-parallel-sharding none:"
            " choose another sharding, or leave it out"
        )
    if config.placement.encoder == "colocated":
        return "--hybrid-shard-size does not support --placement colocated: leave it out, or use --placement stages"
    return None


def secondary_shards_are_gathered(config: Config) -> str | None:
    """Only ZeRO-3 gathers weights again in backward passes; a second shard on each rank would be ZeRO-2's copy."""
    parallel = config.parallel
    if parallel.secondary_shard_size is None:
        return None
    option = f"--secondary-shard-size {parallel.secondary_shard_size}"
    if parallel.data_parallel_sharding != "full":
        return f"{option} needs --data-parallel-sharding full, which gathers weights again: choose it, or leave it out"
    if parallel.secondary_shard_size == 1:
        return f"{option} would keep whole weights: use --data-parallel-sharding optimizer_gradients, or leave it out"
    return None


def links_carry_codes(config: Config) -> str | None:
    """Codes of gradients and weights replace megatron-core's collectives, or those of torch's `fully_shard`."""
    parallel, precision = config.parallel, config.precision
    sharding = parallel.data_parallel_sharding
    gradients, weights = parallel.compress_gradients != "none", parallel.compress_weights != "none"
    option = f"--compress-gradients {parallel.compress_gradients}"
    if not gradients:
        option = f"--compress-weights {parallel.compress_weights}"
    if (gradients or weights) and precision.dtype == "fp16":
        return f"{option} does not support the loss scaling of --precision fp16: use --precision bf16"
    if (gradients or weights) and config.model.experts.num_experts:
        return f"{option} does not support --num-experts: leave it out"
    if not (parallel.compress_error_feedback or gradients):
        return (
            "parallel.compress_error_feedback=false has no effect without --compress-gradients: add it, or leave this "
            "out"
        )
    if (size := parallel.compress_group_size) is not None:
        option = f"parallel.compress_group_size {size}"
        if not gradients:
            return f"{option} has no effect without --compress-gradients: add it"
        if sharding == "none" or parallel.hybrid_shard_size is not None:
            what = "--hybrid-shard-size" if sharding != "none" else "--data-parallel-sharding none"
            return f"{option} does not support {what}: leave one out"
    option = f"--compress-weights {parallel.compress_weights}"
    if weights and sharding == "none":
        return f"{option} has no weights to gather with --data-parallel-sharding none: use optimizer, or leave it out"
    if weights and precision.dtype == "fp32":
        return f"{option} needs exact master weights beside the gathered ones: use --precision bf16"
    if weights and precision.fp8_param_gather:
        return f"{option} and --fp8-param-gather both say how weights are gathered: leave one out"
    return None


SHARDING_RULES: tuple[Callable[[Config], str | None], ...] = (
    param_gather_overlaps_what_exists,
    buckets_are_reduced_apart,
    loss_scale_has_an_optimizer,
    hybrid_shards_something,
    secondary_shards_are_gathered,
    links_carry_codes,
)
