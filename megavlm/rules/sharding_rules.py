"""Rules about context parallelism, the order of a pipeline's passes, and data-parallel sharding."""

from __future__ import annotations

import math
from collections.abc import Iterator

from megavlm.arch.tensor_split import context_heads, local_heads
from megavlm.config.derived import masks_attention, sequence_parallel, shards_gradients
from megavlm.config.messages import divisors, nearest
from megavlm.config.schema import Config
from megavlm.rules import Rule


def context_parallelism(config: Config) -> Iterator[str]:
    """CP must divide heads or sequence, by which ranks exchange; gathered keys know no masks."""
    parallel, cp = config.parallel, config.parallel.context_parallel_size
    tp, length = parallel.tensor_model_parallel_size, config.train.seq_length
    if parallel.cp_comm_type == "a2a" and (heads := local_heads(config)) % cp:
        yield (
            f"--context-parallel-size {cp} does not divide the {heads} query heads of a rank "
            f"(model.language.num_attention_heads {config.model.language.num_attention_heads}, "
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
    """Interleaving is for several chunks per stage; each of the other orders is for one. ZB-H1 computes gradients of
    weights apart, when ZeRO-2 and 3 have reduced a layer's.
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
    """Only ZeRO-3 gathers weights again in backward passes; a second shard on each rank would be ZeRO-2's copy."""
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
    if parallel.hybrid_shard_size is not None and config.placement.encoder == "colocated":
        yield "--hybrid-shard-size does not support --placement colocated: leave it out, or use --placement stages"
    option = f"--secondary-shard-size {parallel.secondary_shard_size}"
    if parallel.secondary_shard_size is not None and sharding != "full":
        yield f"{option} needs --data-parallel-sharding full, which gathers weights again: choose it, or leave it out"
    if parallel.secondary_shard_size == 1:
        yield f"{option} would keep whole weights: use --data-parallel-sharding optimizer_gradients, or leave it out"


def codes_on_links(config: Config) -> Iterator[str]:
    """Codes of gradients and weights replace megatron-core's collectives, or those of torch's `fully_shard`."""
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
    if weights and precision.dtype == "fp32":
        yield f"{of_weights} needs exact master weights beside the gathered ones: use --precision bf16"
    if weights and precision.fp8_param_gather:
        yield f"{of_weights} and --fp8-param-gather both say how weights are gathered: leave one out"


SHARDING_RULES: tuple[Rule, ...] = (
    pipeline_schedule,
    context_parallelism,
    overlap_of_data_parallelism,
    shards,
    codes_on_links,
)
