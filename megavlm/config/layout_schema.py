"""Options of how a model is computed: parallelism, placement, execution and precision."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal

from megavlm.config.option import (
    COLOCATED,
    EXPERTS,
    LAYOUT,
    PRECISION,
    Count,
    Natural,
    Needs,
    Positive,
    key_only,
    option,
)

FP8 = Needs(lambda config: config.precision.fp8 != "none", "without FP8", "add --fp8 hybrid")
of_fp8 = partial(option, needs=FP8)
DELAYED_SCALING = (
    FP8,
    Needs(
        lambda config: config.precision.fp8_recipe == "delayed", "without delayed scaling", "use --fp8-recipe delayed"
    ),
)
COMPRESSED = Needs(
    lambda config: config.parallel.compress_gradients != "none", "without --compress-gradients", "add it"
)
BF16_LAYERS = Needs(
    lambda config: config.precision.first_last_layers_bf16, "without --first-last-layers-bf16", "add it"
)


@dataclass(frozen=True)
class ParallelConfig:
    """How ranks split the model, the batch and the optimizer state."""

    tensor_model_parallel_size: Count = option(1, "Number of ranks that split each layer.", "--tp", common=LAYOUT)
    pipeline_model_parallel_size: Count = option(1, "Number of pipeline stages.", "--pp", common=LAYOUT)
    virtual_pipeline_model_parallel_size: Count = option(
        1, "Model chunks per pipeline stage (interleaved 1F1B).", "--vpp", common=LAYOUT
    )
    schedule: Literal["1f1b", "interleaved", "gpipe", "zb-h1"] | None = option(
        None,
        "Order of a pipeline's passes: 1f1b, interleaved (with --vpp), gpipe, or zb-h1, which fills waiting times with "
        "weight gradients; default: 1f1b, with --vpp interleaved.",
    )
    context_parallel_size: Count = option(
        1,
        "Number of ranks that split each sequence (context parallelism), for sequences that one rank cannot hold.",
        "--cp",
    )
    cp_comm_type: Literal["auto", "a2a", "all_gather"] = option(
        "auto",
        "How ranks of --cp attend to one another's positions: exchange heads (a2a), gather keys and values "
        "(all_gather), or both (auto): as many ranks exchange heads as the heads allow, and groups of them gather.",
        needs=Needs(
            lambda config: config.parallel.context_parallel_size > 1, "without context parallelism", "add --cp 2"
        ),
    )
    expert_model_parallel_size: Count = option(
        1,
        "Number of ranks that hold different experts of each layer; must divide --num-experts.",
        "--ep",
        needs=EXPERTS,
    )
    expert_tensor_parallel_size: Count | None = option(
        None, "Number of ranks that split each expert; default: TP if EP is 1, else 1.", "--etp", needs=EXPERTS
    )
    moe_token_dispatcher_type: Literal["alltoall", "allgather"] = option(
        "alltoall",
        "How tokens reach experts on other ranks: each is sent to its experts (alltoall), or all tokens are gathered "
        "by all ranks of EP × ETP (allgather).",
        needs=EXPERTS,
    )
    sequence_parallel: bool | None = option(
        None,
        "Shard activations outside attention and MLP along the sequence over TP ranks; default: on if TP > 1.",
        "--sp",
    )
    vision_tensor_model_parallel_size: Count = option(
        1,
        "Colocated encoder: number of ranks that split an encoder too large for one GPU; must divide TP × CP × PP.",
        "--vision-tp",
        needs=COLOCATED,
    )
    data_parallel_sharding: Literal["none", "optimizer", "optimizer_gradients", "full"] = option(
        "optimizer",
        "Shard nothing, optimizer state (ZeRO-1), also gradients (ZeRO-2), or also parameters (full, ZeRO-3) over "
        "data-parallel ranks.",
        common=LAYOUT,
    )
    hybrid_shard_size: Count | None = option(
        None,
        "Number of data-parallel ranks per shard group; groups replicate one another (HSDP). Default: one group "
        "of all ranks.",
    )
    secondary_shard_size: Count | None = option(
        None,
        "ZeRO-3: number of neighbouring data-parallel ranks (of a node) that keep a second shard of gathered weights "
        "from a forward pass to its backward pass, which then gathers among them alone (ZeRO++'s hpZ, "
        "zero_hpz_partition_size). Default: backward passes gather over all ranks that shard.",
    )
    overlap_grad_reduce: bool | None = option(
        None, "Overlap gradient reduction with the backward pass; default: on if DP > 1."
    )
    overlap_param_gather: bool | None = option(
        None,
        "Overlap the all-gather of parameters with the forward pass; default: on if DP > 1 and optimizer state is "
        "sharded.",
    )
    grad_reduce_in_bf16: bool = option(
        False,
        "Reduce gradients in bf16, which halves their bytes on links; default: fp32. Unless they are sharded, they are "
        "summed over micro-batches in bf16 as well.",
    )
    ddp_bucket_size: Count | None = key_only(
        None,
        "Number of parameters per gradient bucket, which is reduced in one collective; default: the larger of 40 "
        "million and 1 million × DP.",
    )
    compress_gradients: Literal["none", "bf16", "int8", "fp8"] = option(
        "none",
        "Sum gradients as codes of two bytes (bf16) or one (int8, fp8, by blocks of 128), and add a step's coding "
        "error to the next step's gradients; with --hybrid-shard-size only between shard groups.",
    )
    compress_group_size: Count | None = key_only(
        None,
        "--compress-gradients: number of neighbouring data-parallel ranks with fast links (of a node), which sum exact "
        "gradients before codes are sent; must divide DP × CP. Default: every rank sends codes.",
        needs=COMPRESSED,
    )
    compress_weights: Literal["none", "int8", "fp8"] = option(
        "none", "Gather updated weights as codes of one byte, by blocks of 128; master weights stay exact."
    )
    distributed_timeout_minutes: Positive = option(
        10.0, "Timeout of collectives in minutes; a collective that exceeds it ends the run."
    )
    spare_ranks: bool = option(
        False,
        "Let ranks that the layout or the global batch cannot use wait idle, for jobs whose number of nodes changes; "
        "off: refuse to start with such a number of ranks.",
    )


@dataclass(frozen=True)
class PlacementConfig:
    """Where layers run: placement of the vision encoder, pipeline cuts, or a layout that the planner finds."""

    encoder: Literal["stages", "colocated"] = option(
        "stages",
        "Where the encoders run: in pipeline stages, or colocated on every rank.",
        flag="--placement",
        common=LAYOUT,
    )
    encoder_chunk_patches: Count | None = option(
        None,
        "Colocated encoder: maximum number of patches, or of mel frames, per encoder pass (at least one image), which "
        "bounds activation memory; default: 16384 on a GPU, 4096 on a CPU.",
        needs=COLOCATED,
    )
    encoder_keep_chunks: Natural = key_only(
        1,
        "Colocated encoder: number of encoder chunks per step whose activations are kept for the backward pass; "
        "the rest are recomputed.",
        needs=COLOCATED,
    )
    encode_ahead: bool = option(
        False,
        "Colocated, frozen encoder: encode the images of the next step during this step (on a GPU: on a side stream).",
        needs=COLOCATED,
    )
    vision_cache: str | None = option(
        None,
        "Colocated, frozen encoder: folder of cached features, which runs with the same encoder can share; default: no "
        "cache.",
        needs=COLOCATED,
    )
    vision_cache_size: Positive = key_only(
        10.0,
        "Size limit of --vision-cache in GiB; least recently used entries are evicted.",
        needs=Needs(
            lambda config: config.placement.vision_cache is not None, "without a cache", "add --vision-cache DIR"
        ),
    )
    plan: Literal["manual", "auto"] = option(
        "manual",
        "Use the given layout and micro-batch size, or those that the planner predicts to be fastest (auto).",
        common=LAYOUT,
    )
    hardware: str | None = option(
        None,
        "Device for --plan auto, and for the step time that --dry-run predicts: a100, h100, h200, b200, gh200, l40s, "
        "l4, a cloud's machine type, cpu, or a JSON file from megavlm calibrate; default: this machine's GPU; without "
        "one h100, but cpu in fp32.",
    )
    pipeline_cuts: tuple[int, ...] | None = option(
        None,
        "Layer indices at which model chunks after the first begin (PP × VPP − 1 numbers; --dry-run lists the "
        "layers); default: chunks of equal FLOPs.",
    )


@dataclass(frozen=True)
class ExecutionConfig:
    """How layers are executed: their implementation, recomputation and offloading."""

    transformer_impl: Literal["auto", "te", "torch"] = option(
        "auto",
        "Implementation of transformer layers: Transformer Engine, PyTorch, or auto (Transformer Engine if it and "
        "a GPU are available).",
    )
    recompute_granularity: Literal["none", "selective", "full"] = option(
        "none", "Recompute attention (selective) or whole layers (full) in the backward pass.", common=PRECISION
    )
    offload: tuple[str, ...] = option(
        (),
        "Tensors kept in host memory: optimizer, activations, with ZeRO-3 parameters; on disk: optimizer=nvme:DIR; "
        "default: none.",
        common=PRECISION,
    )
    gradient_accumulation_fusion: bool = option(
        True,
        "Add weight gradients to the fp32 gradient buffer inside the matrix product (Transformer Engine's layers; with "
        "NVIDIA Apex the output layer as well); off with sharded gradients or offloaded activations.",
    )
    loss_chunk_tokens: Count = key_only(
        2048,
        "Largest number of tokens whose logits are in memory at a time. A trained output layer computes the logits of "
        "a micro-batch with more tokens again in the backward pass; a larger number avoids this but needs more memory.",
    )
    compile_small_ops: bool = option(
        False,
        "PyTorch layers: compile the activation function and the rotary embedding to one kernel each; needs a "
        "compiler (GPU: Triton).",
    )


@dataclass(frozen=True)
class PrecisionConfig:
    """Number formats of parameters, activations and matrix products."""

    dtype: Literal["fp32", "bf16", "fp16"] = option(
        None,
        "Type of parameters and activations (main weights are fp32); default: fp32, given weights: bf16.",
        flag="--precision",
        common=PRECISION,
    )
    fp8: Literal["none", "hybrid", "e4m3"] = option(
        "none",
        "FP8 format of linear layers: e4m3, or hybrid with e5m2 for output gradients. Needs --precision bf16.",
        common=PRECISION,
    )
    fp8_recipe: Literal["delayed", "tensorwise", "blockwise", "mxfp8"] = of_fp8(
        "tensorwise",
        "FP8 scaling: delayed (per tensor, amax history), tensorwise (per tensor, current amax), blockwise, or "
        "mxfp8 (32-element blocks, Blackwell GPUs).",
    )
    fp8_parts: tuple[Literal["vision", "language"], ...] = of_fp8(
        ("language",), "FP8: parts of the model whose transformer layers use FP8."
    )
    first_last_layers_bf16: bool = of_fp8(False, "FP8: keep the first and the last layers of each part in bf16.")
    num_layers_at_start_in_bf16: Natural = key_only(
        1, "FP8: number of first layers that --first-last-layers-bf16 keeps in bf16.", needs=BF16_LAYERS
    )
    num_layers_at_end_in_bf16: Natural = key_only(
        1, "FP8: number of last layers that --first-last-layers-bf16 keeps in bf16.", needs=BF16_LAYERS
    )
    fp8_amax_history_len: Count = key_only(
        1024, "FP8 delayed scaling: length of the amax history in passes.", needs=DELAYED_SCALING
    )
    fp8_param_gather: bool = of_fp8(
        False, "FP8: store trained weights in FP8 only and all-gather them in FP8; needs Transformer Engine."
    )
