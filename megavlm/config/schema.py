"""Every option of a run, as frozen dataclasses: the single source of flags, YAML keys, defaults and help.

A field made with `option(default, help, *aliases)` becomes the flag `--kebab-case-name` (fields of the vision,
projector, language and lora sections carry that prefix) and the YAML key `section.name`. Names are Megatron's.
`common=` names the group in which `--help` lists the option; `--help-all` lists every option. Rules that relate
fields to one another live in `rules.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from megavlm.config.model_schema import LanguageConfig, LoraConfig, ModelConfig, ProjectorConfig, VisionConfig
from megavlm.config.option import DATA, FILES, LAYOUT, MODEL, PRECISION, TRAINING, option

__all__ = [
    "CheckpointConfig",
    "Config",
    "DataConfig",
    "EvaluationConfig",
    "LanguageConfig",
    "LoggingConfig",
    "LoraConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "ProjectorConfig",
    "SourceConfig",
    "TrainConfig",
    "VisionConfig",
]


@dataclass(frozen=True)
class ParallelConfig:
    """How ranks split the model, the batch and the optimizer state."""

    tensor_model_parallel_size: int = option(1, "Number of ranks that split each layer.", "--tp", common=LAYOUT)
    pipeline_model_parallel_size: int = option(1, "Number of pipeline stages.", "--pp", common=LAYOUT)
    virtual_pipeline_model_parallel_size: int = option(
        1, "Model chunks per pipeline stage (interleaved 1F1B).", "--vpp", common=LAYOUT
    )
    context_parallel_size: int = option(1, "Number of ranks that split each sequence; only 1 is supported.", "--cp")
    expert_model_parallel_size: int = option(1, "Number of ranks that split the experts; only 1 is supported.", "--ep")
    sequence_parallel: bool | None = option(
        None,
        "Shard activations outside attention and MLP along the sequence over TP ranks; default: on if TP > 1.",
        "--sp",
    )
    placement: Literal["stages", "colocated"] = option(
        "stages",
        "Run the vision encoder as pipeline stages, or colocated: a copy on every rank encodes a share of the "
        "images before the language pipeline starts.",
        common=LAYOUT,
    )
    vision_tensor_model_parallel_size: int = option(
        1,
        "Colocated encoder: number of ranks that split an encoder too large for one GPU; must divide TP × PP.",
        "--vision-tp",
    )
    encoder_chunk_patches: int | None = option(
        None,
        "Colocated encoder: maximum number of patches per encoder pass (at least one image), which bounds "
        "activation memory; default: 16384 on a GPU, 4096 on a CPU.",
    )
    encoder_keep_chunks: int = option(
        1,
        "Colocated encoder: number of encoder chunks per step whose activations are kept for the backward pass; "
        "the rest are recomputed.",
    )
    encode_ahead: bool = option(
        False,
        "Colocated, frozen encoder: encode the images of the next step during this step (on a GPU: on a side stream).",
    )
    vision_cache: str | None = option(
        None,
        "Colocated, frozen encoder: folder of cached image features, which runs with the same encoder can share; "
        "default: no cache.",
    )
    vision_cache_size: float = option(
        10.0, "Size limit of --vision-cache in GiB; least recently used entries are evicted."
    )
    plan: Literal["manual", "auto"] = option(
        "manual",
        "Use the given layout and micro-batch size, or those that the planner predicts to be fastest (auto).",
        common=LAYOUT,
    )
    hardware: str = option(
        "cpu",
        "Device for --plan auto: a100, h100, h200, b200, gh200, cpu, or a JSON file from tools/calibrate.py.",
        common=LAYOUT,
    )
    pipeline_cuts: tuple[int, ...] | None = option(
        None,
        "Layer indices at which model chunks after the first begin (PP × VPP − 1 numbers; --dry-run lists the "
        "layers); default: chunks of equal FLOPs.",
    )
    data_parallel_sharding: Literal["none", "optimizer", "optimizer_gradients", "full"] = option(
        "optimizer",
        "Shard nothing, optimizer state (ZeRO-1), also gradients (ZeRO-2), or also parameters (full, ZeRO-3) over "
        "data-parallel ranks.",
        common=LAYOUT,
    )
    hybrid_shard_size: int | None = option(
        None,
        "Number of data-parallel ranks per shard group; groups replicate one another (HSDP). Default: one group "
        "of all ranks.",
    )
    offload: tuple[Literal["optimizer", "activations"], ...] = option(
        (),
        "Keep Adam's moments (then updated by the CPU) or saved activations in host memory; default: neither.",
        common=PRECISION,
    )
    overlap_grad_reduce: bool | None = option(
        None, "Overlap gradient reduction with the backward pass; default: on if DP > 1."
    )
    overlap_param_gather: bool | None = option(
        None,
        "Overlap the all-gather of parameters with the forward pass; default: on if DP > 1 and optimizer state is "
        "sharded, except with --cuda-graphs.",
    )
    ddp_bucket_size: int | None = option(
        None,
        "Number of parameters per gradient bucket, which is reduced in one collective; default: the larger of 40 "
        "million and 1 million × DP.",
    )
    tp_comm_overlap: bool = option(
        False,
        "Overlap tensor-parallel communication of language layers with their matrix products; needs GPUs with "
        "Transformer Engine.",
    )
    distributed_timeout_minutes: float = option(
        10.0, "Timeout of collectives in minutes; a collective that exceeds it ends the run."
    )


@dataclass(frozen=True)
class TrainConfig:
    train_iters: int = option(100, "Number of optimizer steps of the whole run.", common=TRAINING)
    micro_batch_size: int = option(1, "Sequences per micro-batch of a data-parallel rank.", "--mbs", common=TRAINING)
    global_batch_size: int = option(8, "Sequences per optimizer step over all ranks.", "--gbs", common=TRAINING)
    seq_length: int = option(64, "Sequence length in tokens, image tokens included.", common=DATA)
    seed: int = option(1234, "Random seed of weights, data order and dropout.", common=TRAINING)
    precision: Literal["fp32", "bf16", "fp16"] = option(
        "fp32",
        "Type of parameters and activations; main weights, Adam's moments and gradient sums are fp32.",
        common=PRECISION,
    )
    transformer_impl: Literal["auto", "te", "torch"] = option(
        "auto",
        "Implementation of transformer layers: Transformer Engine, PyTorch, or auto (Transformer Engine if it and "
        "a GPU are available).",
    )
    gradient_accumulation_fusion: bool = option(
        True,
        "Transformer Engine layers: add weight gradients to the fp32 gradient buffer inside the matrix product; "
        "off with sharded gradients or offloaded activations.",
    )
    fp8: Literal["none", "hybrid", "e4m3"] = option(
        "none",
        "FP8 format of linear layers: e4m3, or hybrid with e5m2 for output gradients. Needs --precision bf16.",
        common=PRECISION,
    )
    fp8_recipe: Literal["delayed", "tensorwise", "blockwise", "mxfp8"] = option(
        "tensorwise",
        "FP8 scaling: delayed (per tensor, amax history), tensorwise (per tensor, current amax), blockwise, or "
        "mxfp8 (32-element blocks, Blackwell GPUs).",
    )
    fp8_parts: tuple[Literal["vision", "language"], ...] = option(
        ("language",), "FP8: parts of the model whose transformer layers use FP8."
    )
    first_last_layers_bf16: bool = option(False, "FP8: keep the first and the last layers of each part in bf16.")
    num_layers_at_start_in_bf16: int = option(
        1, "FP8: number of first layers that --first-last-layers-bf16 keeps in bf16."
    )
    num_layers_at_end_in_bf16: int = option(
        1, "FP8: number of last layers that --first-last-layers-bf16 keeps in bf16."
    )
    fp8_margin: int = option(
        0, "FP8 delayed scaling: divide scales by 2 to the power of this margin, as headroom against overflow."
    )
    fp8_amax_history_len: int = option(1024, "FP8 delayed scaling: length of the amax history in passes.")
    fp8_amax_compute_algo: Literal["max", "most_recent"] = option(
        "max",
        "FP8 delayed scaling: compute the scale from the maximum of the amax history or from its most recent entry.",
    )
    fp8_param_gather: bool = option(
        False, "FP8: store trained weights in FP8 only and all-gather them in FP8; needs Transformer Engine."
    )
    recompute_granularity: Literal["none", "selective", "full"] = option(
        "none",
        "Recompute nothing, attention (selective), or whole layers (full) in the backward pass.",
        common=PRECISION,
    )
    cuda_graphs: bool = option(
        False,
        "GPU: capture each language layer in a CUDA graph, which saves launch time of small layers; needs "
        "sequences of one length.",
    )
    compile_small_ops: bool = option(
        False,
        "PyTorch layers: compile the activation function and the rotary embedding to one kernel each; needs a "
        "compiler (GPU: Triton).",
    )
    run_dir: str = option(
        "runs/latest",
        "Output folder; its latest checkpoint resumes.",
        common=FILES,
    )
    dry_run: bool = option(
        False,
        "Print the plan and memory estimate and exit.",
        common=FILES,
    )


@dataclass(frozen=True)
class OptimizerConfig:
    lr: float = option(1e-3, "Peak learning rate.", common=TRAINING)
    min_lr: float = option(0.0, "Learning rate at the end of the decay.")
    vision_lr: float | None = option(None, "Peak learning rate of the vision encoder; default: --lr.")
    projector_lr: float | None = option(None, "Peak learning rate of the projector; default: --lr.")
    language_lr: float | None = option(None, "Peak learning rate of the language model; default: --lr.")
    lr_decay_style: Literal["constant", "linear", "cosine", "WSD"] = option(
        "cosine", "Shape of the decay after the warm-up.", common=TRAINING
    )
    lr_warmup_iters: int = option(0, "Steps of linear learning-rate warm-up.", common=TRAINING)
    lr_decay_iters: int | None = option(None, "Step at which the learning-rate decay ends; default: --train-iters.")
    lr_wsd_decay_iters: int | None = option(
        None, "WSD: number of steps of the final decay; default: a tenth of the steps before the decay ends."
    )
    weight_decay: float = option(0.01, "Decoupled weight decay (AdamW); not applied to norms and biases.")
    adam_beta1: float = option(0.9, "Decay rate of Adam's first moment.")
    adam_beta2: float = option(0.95, "Decay rate of Adam's second moment.")
    adam_eps: float = option(1e-8, "Epsilon of AdamW.")
    clip_grad: float = option(
        1.0, "Maximum global gradient norm; larger gradients are scaled down to it. 0: no clipping."
    )
    initial_loss_scale: float = option(4096.0, "fp16: initial loss scale, which keeps small gradients above underflow.")
    min_loss_scale: float = option(1.0, "fp16: lower bound of the loss scale.")
    loss_scale_window: int = option(1000, "fp16: number of steps without overflow after which the loss scale doubles.")
    hysteresis: int = option(
        2, "fp16: number of overflows before the loss scale is halved; each overflow skips its step."
    )


@dataclass(frozen=True)
class SourceConfig:
    """One data set of the user (`data.sources`, or `--sources PATH,weight=2,image_root=DIR …`)."""

    path: str = option("", "File of records, or for webdataset the folder of tars or its meta-dataset file.")
    kind: Literal["auto", "llava", "messages", "text", "webdataset"] = option(
        "auto",
        "Format: LLaVA JSON or JSONL, messages JSONL or parquet, plain text, or WebDataset tars; auto detects it.",
    )
    weight: float = option(1.0, "Sampling weight relative to the other data sets.")
    image_root: str | None = option(
        None, "Folder that contains all image files; image paths are relative to it. Default: the folder of the path."
    )
    name: str | None = option(None, "Name in metrics; default: the file name.")


@dataclass(frozen=True)
class DataConfig:
    source: Literal["synthetic", "digits", "files"] | None = option(
        None,
        "Kind of data: your files (--sources), synthetic, or digits (demo); default: files if --sources is given, "
        "else synthetic.",
        "--data",
        common=DATA,
    )
    sources: tuple[SourceConfig, ...] = option(
        (),
        "Data sets of --data files, as PATH[,weight=2][,kind=llava][,image_root=DIR][,name=NAME]; default: none.",
        common=DATA,
    )
    tokenizer: str | None = option(
        None,
        "Hugging Face tokenizer folder or SentencePiece file; default: that of --init-from or --language-from.",
        common=DATA,
    )
    chat_template: str = option(
        "auto",
        "Files: name of a built-in chat template, a .jinja file, or auto (the tokenizer's, else the model family's).",
    )
    train_on: Literal["assistant", "last", "all"] = option(
        "assistant", "Files: tokens with a loss: all assistant turns, the last assistant turn, or all tokens."
    )
    image_processor: str | None = option(
        None,
        "Files: folder with preprocessor_config.json; default: the Hugging Face model's, else images are resized "
        "to --vision-image-size.",
    )
    fast_image_resize: bool = option(
        False, "Files: use a faster image resize, which differs by up to 3 of 255 levels in few pixels."
    )
    max_image_pixels: int = option(
        2**26, "Files: skip samples with an image of more pixels than this, before the image is decoded."
    )
    shuffle: bool = option(True, "Files: shuffle samples anew in each epoch; off: use the order of the files.")
    packing: bool = option(
        True, "Files: pack several samples into each sequence; samples do not attend to one another."
    )
    packing_window: int = option(
        2048, "Files: number of samples that are packed together; a larger window leaves less padding."
    )
    balance: bool = option(
        True, "Files: assign sequences to ranks and micro-batches so that their compute cost is even."
    )
    num_workers: int = option(
        2,
        "Files: number of processes per model replica that read and decode samples; 0: one thread of the training "
        "process.",
    )
    max_bad_sample_rate: float = option(
        0.05, "Files: fraction of skipped samples above which the run ends, once 20 samples were skipped."
    )
    images_per_sample: tuple[int, ...] = option(
        (1,), "Synthetic: numbers of images per sample; samples cycle through the list."
    )
    image_sizes: tuple[int, ...] = option(
        (), "Synthetic: image sides in pixels; images cycle through the list. Default: --vision-image-size."
    )
    imageless_share: float = option(0.0, "Synthetic: fraction of samples without images.")
    imageless_samples: tuple[int, ...] = option(
        (), "Synthetic: indices (from 0) of samples in each global batch that have no images; default: no index."
    )
    answer_share: float = option(0.5, "Synthetic: fraction of a sample's text tokens that have a loss.")


@dataclass(frozen=True)
class CheckpointConfig:
    save_interval: int = option(0, "Steps between checkpoints; 0: one at the end.", common=FILES)
    keep_checkpoints: int = option(2, "Number of latest checkpoints to keep; 0: keep all.")
    save: bool = option(True, "Write checkpoints; --save-interval sets how often.")
    load: str | None = option(
        None,
        "Run or checkpoint that a new run starts from; default: none.",
        common=FILES,
    )
    init_from: str | None = option(
        None,
        "Hugging Face folder with the model's configuration and initial weights; default: random weights.",
        common=MODEL,
    )
    vision_from: str | None = option(
        None,
        "Hugging Face folder of the vision encoder; the projector starts random. Default: none.",
        common=MODEL,
    )
    language_from: str | None = option(None, "Hugging Face folder of the language model; default: none.", common=MODEL)


@dataclass(frozen=True)
class EvaluationConfig:
    eval_interval: int = option(
        0, "Number of steps between evaluations; 0: only one at the end. Only --data digits has an evaluation."
    )
    eval_samples: int = option(96, "Number of questions of each kind in an evaluation.")


@dataclass(frozen=True)
class LoggingConfig:
    log_interval: int = option(1, "Steps between progress lines; metrics.jsonl records every step.")
    tensorboard: bool = option(True, "Write TensorBoard files to RUN_DIR/tensorboard.")
    profile: bool = option(
        False, "Profile steps with torch.profiler: write RUN_DIR/profile/rank-N.json.gz and the most expensive kernels."
    )
    profile_step_start: int = option(10, "Profiler: number of steps that run before the trace starts.")
    profile_step_end: int = option(12, "Profiler: last step of the trace.")
    profile_ranks: tuple[int, ...] = option((0,), "Profiler: ranks that write a trace.")


@dataclass(frozen=True)
class Config:
    """A whole run. `--print-config` prints it, RUN_DIR/config.yaml keeps it, `--config` reads it back."""

    model: ModelConfig = field(default_factory=ModelConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    data: DataConfig = field(default_factory=DataConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
