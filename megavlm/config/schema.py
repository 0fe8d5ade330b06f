"""Every option of a run, as frozen dataclasses: the single source of flags, YAML keys, defaults and help.

A field made with `option(default, help, *aliases)` becomes `--kebab-case-name` (fields of the vision,
projector and language sections carry that prefix) and the YAML key `section.name`. Names are Megatron's.
Rules that relate fields to one another live in `rules.py`; nothing here computes anything but sums of fields.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal


def option(default: Any, help: str, *aliases: str) -> Any:
    """Declare a dataclass field with its help line and its short flag aliases (`"--tp"`)."""
    return field(default=default, metadata={"help": help, "aliases": aliases})


@dataclass(frozen=True)
class VisionConfig:
    """A pre-norm ViT: expresses CLIP, SigLIP, InternViT and the towers of Qwen2.5-VL and Qwen3-VL."""

    num_layers: int = option(4, "Transformer layers of the vision tower.")
    hidden_size: int = option(128, "Width of the vision tower.")
    ffn_hidden_size: int = option(256, "Width inside the vision MLP.")
    num_attention_heads: int = option(4, "Attention heads; padded with exact zeros when TP does not divide them.")
    image_size: int = option(32, "Side in pixels of the images the learned positions are made for.")
    patch_size: int = option(8, "Side in pixels of a patch.")
    in_channels: int = option(3, "Colour channels of an image.")
    temporal_patch_size: int = option(1, "Frames that a patch spans; a still image fills all of them (Qwen: 2).")
    class_token: bool = option(False, "Prepend a learned class token to each image (dropped before the projector).")
    position_embedding: Literal["learned", "rope2d", "learned_rope2d"] = option(
        "learned", "Learned table (interpolated for other sizes), 2-D rotary positions, or both (Qwen3-VL)."
    )
    position_interpolation: Literal["bicubic", "bilinear", "bucket"] = option(
        "bicubic",
        "The learned table for other sizes: resized bicubically, bilinearly with aligned corners (Qwen3-VL), or looked "
        "up at the entry that each patch falls on (SmolVLM).",
    )
    rotary_base: float = option(10000.0, "Base of the 2-D rotary positions.")
    normalization: Literal["LayerNorm", "RMSNorm"] = option("LayerNorm", "Norm of the vision tower.")
    norm_epsilon: float = option(1e-5, "Epsilon of the vision norms.")
    activation: Literal["gelu", "gelu_tanh", "quick_gelu", "swiglu"] = option("gelu", "MLP activation.")
    add_bias_linear: bool = option(True, "Biases in the attention output and the MLP.")
    add_qkv_bias: bool = option(True, "Biases of query, key and value.")
    qk_norm: Literal["none", "head", "full"] = option(
        "none", "RMS-normalise queries and keys: per head, or over all heads at once (InternViT-6B)."
    )
    layer_scale: bool = option(False, "A learned per-channel scale on each residual branch (InternViT).")
    patch_bias: bool = option(True, "Bias of the patch embedding (CLIP has none).")
    pre_norm: bool = option(False, "A norm right after the patch embedding (CLIP).")
    post_norm: bool = option(True, "A norm after the last layer; only applied when that layer's output is used.")
    feature_layer: int = option(-1, "Which layer's output feeds the projector: -1 the last, -2 the one before, …")
    window_size: int | None = option(None, "Side in pixels of the windows that layers attend in; default: the image.")
    full_attention_layers: tuple[int, ...] = option((), "Layers (from 0) that attend over the image, windows or not.")
    deepstack_layers: tuple[int, ...] = option(
        (), "Layers (from 0) whose features are also added after the first language layers (Qwen3-VL's DeepStack)."
    )


@dataclass(frozen=True)
class ProjectorConfig:
    """From vision features to language embeddings."""

    kind: Literal["linear", "mlp"] = option("mlp", "One linear layer, or linear - GELU - linear.")
    hidden_size: int | None = option(None, "Width inside the MLP; default: the language width.")
    pixel_shuffle: int = option(1, "Merge N×N neighbouring patches into one feature before projecting.")
    input_norm: bool = option(False, "LayerNorm before the first linear layer (InternVL).")
    bias: bool = option(True, "Biases of the projector.")
    anyres_max_tiles: int | None = option(
        None,
        "Take images as tiles, their features as one map that is reduced to this many tiles' worth, with a learned "
        "newline after each row (LLaVA-OneVision's anyres_max_N); default: images are not tiled.",
    )


@dataclass(frozen=True)
class LanguageConfig:
    """A decoder-only transformer: expresses Llama, Qwen2, Qwen3 and the language models of their VLMs."""

    num_layers: int = option(4, "Transformer layers of the language model.")
    hidden_size: int = option(128, "Width of the language model.")
    ffn_hidden_size: int = option(256, "Width inside the language MLP.")
    num_attention_heads: int = option(4, "Query heads.")
    num_query_groups: int | None = option(None, "Key/value heads (GQA); default: as many as query heads.")
    kv_channels: int | None = option(None, "Width of a head; default: hidden size / heads.")
    vocab_size: int | None = option(
        None, "Vocabulary; default: the tokenizer's. Padded for TP without changing results."
    )
    rotary_base: float = option(10000.0, "Base of the rotary positions.")
    rope_scaling: Literal["none", "linear", "llama3"] = option(
        "none", "Slower rotation for longer texts: all frequencies alike, or low ones alone (Llama 3.1)."
    )
    rope_scaling_factor: float = option(1.0, "How many times slower.")
    rope_low_freq_factor: float = option(1.0, "Llama 3.1: waves longer than ORIGINAL/this turn slower.")
    rope_high_freq_factor: float = option(4.0, "Llama 3.1: waves shorter than ORIGINAL/this turn as before.")
    rope_original_positions: int = option(8192, "Llama 3.1: ORIGINAL, the sequence length before scaling.")
    max_positions: int | None = option(None, "Longest sequence the model is made for; default: any.")
    mrope_section: tuple[int, ...] = option(
        (), "M-RoPE: channel pairs that turn with time, height and width (Qwen-VL); default: one axis for all."
    )
    mrope_interleaved: bool = option(
        False, "M-RoPE: axes alternate over the pairs instead of dividing them (Qwen3-VL)."
    )
    norm_epsilon: float = option(1e-6, "Epsilon of the RMS norms.")
    add_qkv_bias: bool = option(False, "Biases of query, key and value (Qwen2).")
    qk_norm: bool = option(False, "RMS-normalise queries and keys per head (Qwen3).")
    tie_embeddings: bool = option(False, "Share the input embedding with the output layer.")


@dataclass(frozen=True)
class ModelConfig:
    vision: VisionConfig = field(default_factory=VisionConfig)
    projector: ProjectorConfig = field(default_factory=ProjectorConfig)
    language: LanguageConfig = field(default_factory=LanguageConfig)
    image_token: int | None = option(None, "Token whose places image features take; default: the tokenizer's.")
    init_method_std: float = option(0.02, "Standard deviation of the initial weights.")
    attention_dropout: float = option(0.0, "Dropout on attention probabilities.")
    hidden_dropout: float = option(0.0, "Dropout on each residual branch.")
    freeze: tuple[Literal["vision", "projector", "language"], ...] = option((), "Parts that are not trained.")


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters (Hu et al. 2021), as PEFT defines them; the parts that have some are otherwise frozen."""

    rank: int = option(0, "Rank of the adapters; 0: none.")
    alpha: float = option(16.0, "Adapters are scaled by alpha / rank.")
    dropout: float = option(0.0, "Dropout before an adapter.")
    targets: tuple[str, ...] = option(
        ("language",), "Adapted layers: a part (language, vision), a linear (q_proj), or names with * and ?."
    )


@dataclass(frozen=True)
class ParallelConfig:
    """How the model is laid out over processes."""

    tensor_model_parallel_size: int = option(1, "Processes that share each layer.", "--tp")
    pipeline_model_parallel_size: int = option(1, "Pipeline stages.", "--pp")
    virtual_pipeline_model_parallel_size: int = option(
        1, "Model chunks per pipeline stage (interleaved 1F1B).", "--vpp"
    )
    context_parallel_size: int = option(1, "Processes that share each sequence (only 1 so far).", "--cp")
    expert_model_parallel_size: int = option(1, "Processes that share the experts (only 1 so far).", "--ep")
    sequence_parallel: bool | None = option(
        None, "Shard activations between TP regions; default: on where TP > 1.", "--sp"
    )
    placement: Literal["stages", "colocated"] = option(
        "stages",
        "The vision encoder: layers of the pipeline like any other, or whole on every process, each of which encodes a "
        "share of the images before the language model's pipeline runs.",
    )
    vision_tensor_model_parallel_size: int = option(
        1,
        "Colocated: neighbouring processes of a replica (of TP × PP) that hold an encoder together, if it is too big "
        "for one; the replica's encoders share the images.",
        "--vision-tp",
    )
    encoder_chunk_patches: int | None = option(
        None,
        "Colocated: patches that the encoder takes in one pass (one image at least), which bounds its memory; default: "
        "16384 on a GPU, 4096 on a CPU.",
    )
    encoder_keep_chunks: int = option(
        1, "Colocated: passes of a step whose activations wait for the backward pass; others are computed again."
    )
    encode_ahead: bool = option(
        False,
        "Colocated, frozen encoder: encode the next step's images beside this step (on GPUs, on a stream of its own).",
    )
    vision_cache: str | None = option(
        None, "Colocated, frozen encoder: folder for features of images, shared by runs with the same encoder."
    )
    vision_cache_size: float = option(10.0, "Most GiB that --vision-cache keeps; what was not used for longest goes.")
    plan: Literal["manual", "auto"] = option(
        "manual", "Layout and micro-batch as given, or what the planner finds fastest for this many processes."
    )
    hardware: str = option(
        "cpu", "What --plan auto plans for: a100, h100, h200, b200, cpu, or a JSON file of tools/calibrate.py."
    )
    pipeline_cuts: tuple[int, ...] | None = option(
        None, "Layer-list indices where chunks begin, PP·VPP−1 of them (--dry-run prints the list); default: even."
    )
    data_parallel_sharding: Literal["none", "optimizer", "optimizer_gradients", "full"] = option(
        "optimizer",
        "What data-parallel ranks share instead of each holding it whole: optimizer state (ZeRO-1), gradients as well "
        "(ZeRO-2), parameters as well (ZeRO-3).",
    )
    hybrid_shard_size: int | None = option(
        None, "Data-parallel ranks that share (HSDP); groups of them are replicas. Default: all of them share."
    )
    offload: tuple[Literal["optimizer", "activations"], ...] = option(
        (), "Keep in host memory: Adam's moments, which are updated there; what layers save for their backward pass."
    )
    overlap_grad_reduce: bool | None = option(
        None, "Reduce gradients while the backward pass still runs; default: where DP > 1."
    )
    overlap_param_gather: bool | None = option(
        None,
        "Gather parameters while the forward pass already runs; default: where DP > 1 ranks share optimizer state.",
    )
    ddp_bucket_size: int | None = option(
        None, "Parameters whose gradients are reduced in one message; default: 40 million, or 1 million per replica."
    )
    tp_comm_overlap: bool = option(
        False, "GPUs with Transformer Engine: exchange sequences between TP ranks while language layers compute."
    )
    distributed_timeout_minutes: float = option(10.0, "Collectives that take longer end the run.")


@dataclass(frozen=True)
class TrainConfig:
    train_iters: int = option(100, "Optimizer steps in all.")
    micro_batch_size: int = option(1, "Samples per rank and pipeline micro-batch.", "--mbs")
    global_batch_size: int = option(8, "Samples per optimizer step over all ranks.", "--gbs")
    seq_length: int = option(64, "Tokens of a sample, image tokens included.")
    seed: int = option(1234, "Seed of weights, data order and dropout.")
    precision: Literal["fp32", "bf16", "fp16"] = option(
        "fp32", "Arithmetic of the model; master weights, moments and summed gradients stay fp32."
    )
    transformer_impl: Literal["auto", "te", "torch"] = option(
        "auto", "What layers are made of: Transformer Engine, torch, or the former where it and a CUDA device are."
    )
    gradient_accumulation_fusion: bool = option(
        True,
        "Transformer Engine's layers: products add weight gradients to their fp32 sums themselves, where these exist "
        "(not with gradients sharded or activations offloaded).",
    )
    fp8: Literal["none", "hybrid", "e4m3"] = option(
        "none", "Linear layers' products in FP8: e4m3 for all, or with output gradients in e5m2 (hybrid); needs bf16."
    )
    fp8_recipe: Literal["delayed", "tensorwise", "blockwise", "mxfp8"] = option(
        "tensorwise", "FP8: scales of whole tensors by past or present values, of blocks, or of 32 values (Blackwell)."
    )
    fp8_parts: tuple[Literal["vision", "language"], ...] = option(
        ("language",), "FP8: the parts of the model whose transformer layers run in it."
    )
    first_last_layers_bf16: bool = option(False, "FP8: keep the first and last layers of these parts in bf16.")
    num_layers_at_start_in_bf16: int = option(1, "FP8: how many are the first, with --first-last-layers-bf16.")
    num_layers_at_end_in_bf16: int = option(1, "FP8: how many are the last, with --first-last-layers-bf16.")
    fp8_margin: int = option(0, "FP8, delayed: scales leave this many powers of two unused.")
    fp8_amax_history_len: int = option(1024, "FP8, delayed: passes whose largest values are remembered.")
    fp8_amax_compute_algo: Literal["max", "most_recent"] = option(
        "max", "FP8, delayed: which of the remembered values the scale follows."
    )
    fp8_param_gather: bool = option(
        False, "FP8: keep trained weights in FP8 alone, and gather them so; with Transformer Engine."
    )
    recompute_granularity: Literal["none", "selective", "full"] = option(
        "none", "Recompute in backward: nothing, attention only, or whole layers."
    )
    cuda_graphs: bool = option(
        False, "GPU: launch each language layer as one CUDA graph; for sequences of one length and small layers."
    )
    compile_small_ops: bool = option(
        False, "torch's layers: compile activation and rotation into one kernel each; needs a compiler (GPU: Triton)."
    )
    run_dir: str = option("runs/latest", "Everything the run writes; starting again on it resumes.")
    dry_run: bool = option(False, "Print the plan for this layout and stop (no torchrun needed).")


@dataclass(frozen=True)
class OptimizerConfig:
    lr: float = option(1e-3, "Peak learning rate.")
    min_lr: float = option(0.0, "Learning rate at the end of the decay.")
    vision_lr: float | None = option(None, "Peak learning rate of the vision tower; default: --lr.")
    projector_lr: float | None = option(None, "Peak learning rate of the projector; default: --lr.")
    language_lr: float | None = option(None, "Peak learning rate of the language model; default: --lr.")
    lr_decay_style: Literal["constant", "linear", "cosine", "WSD"] = option("cosine", "Shape of the decay.")
    lr_warmup_iters: int = option(0, "Iterations of linear warm-up.")
    lr_decay_iters: int | None = option(None, "Iteration at which the decay ends; default: --train-iters.")
    lr_wsd_decay_iters: int | None = option(None, "Length of the final decay of WSD; default: a tenth of the run.")
    weight_decay: float = option(0.01, "Decoupled weight decay; norms and biases have none.")
    adam_beta1: float = option(0.9, "First-moment decay.")
    adam_beta2: float = option(0.95, "Second-moment decay.")
    adam_eps: float = option(1e-8, "Epsilon of AdamW.")
    clip_grad: float = option(1.0, "Largest global gradient norm; 0: no clipping.")
    initial_loss_scale: float = option(4096.0, "fp16: factor of the loss at first, so that small gradients survive.")
    min_loss_scale: float = option(1.0, "fp16: the loss scale is never halved below.")
    loss_scale_window: int = option(1000, "fp16: steps without overflow after which the loss scale doubles.")
    hysteresis: int = option(2, "fp16: overflows before the loss scale is halved; each of them skips its step.")


@dataclass(frozen=True)
class SourceConfig:
    """One of the user's data sets (`data.sources`, or `--sources PATH,weight=2,image_root=DIR …`)."""

    path: str = option("", "File of records, or for webdataset the folder or meta-dataset file.")
    kind: Literal["auto", "llava", "messages", "text", "webdataset"] = option(
        "auto", "LLaVA JSON or JSONL, messages JSONL or parquet, plain text, WebDataset tars; default: by looking."
    )
    weight: float = option(1.0, "Share of the samples drawn, relative to the other sources.")
    image_root: str | None = option(None, "Folder that image paths are relative to and must stay in; default: path's.")
    name: str | None = option(None, "Name in metrics; default: the file's.")


@dataclass(frozen=True)
class DataConfig:
    source: Literal["synthetic", "digits", "files"] | None = option(
        None, "Where samples come from; default: files where --sources are given, else synthetic.", "--data"
    )
    sources: tuple[SourceConfig, ...] = option(
        (), "Files: your data sets, PATH[,weight=2][,kind=llava][,image_root=DIR][,name=NAME] …"
    )
    tokenizer: str | None = option(
        None, "Files: folder of a Hugging Face tokenizer, or a SentencePiece model; default: the model's own folder."
    )
    chat_template: str = option(
        "auto", "Files: auto (the tokenizer's own, else the model's), a template's name, or a .jinja file."
    )
    train_on: Literal["assistant", "last", "all"] = option(
        "assistant", "Files: train on what the assistant says, on its last turn only, or on the whole text."
    )
    image_processor: str | None = option(
        None, "Files: folder of preprocessor_config.json; default: the model's own, else resizing to the tower's size."
    )
    fast_image_resize: bool = option(False, "Files: resize images faster, off by up to 3 grey levels in rare pixels.")
    max_image_pixels: int = option(2**26, "Files: larger images are skipped before they are decoded.")
    shuffle: bool = option(True, "Files: a new order for each epoch; off: the files' own.")
    packing: bool = option(True, "Files: several samples per sequence, none of which sees another.")
    packing_window: int = option(2048, "Files: samples that are packed together; more fill sequences better.")
    balance: bool = option(True, "Files: assign sequences to ranks and micro-batches by their measured cost.")
    num_workers: int = option(2, "Files: processes per model replica that read and decode; 0: a thread.")
    max_bad_sample_rate: float = option(0.05, "Files: share of skipped samples that ends the run, once 20 are.")
    images_per_sample: tuple[int, ...] = option((1,), "Synthetic: image counts, cycled over samples.")
    image_sizes: tuple[int, ...] = option(
        (), "Synthetic: image sides in pixels, cycled over images; default: the model's."
    )
    imageless_share: float = option(0.0, "Synthetic: share of samples without any image.")
    imageless_samples: tuple[int, ...] = option((), "Synthetic: places in each global batch that have no image.")
    answer_share: float = option(0.5, "Synthetic: share of a sample's text that is trained on.")


@dataclass(frozen=True)
class CheckpointConfig:
    save_interval: int = option(0, "Iterations between checkpoints; 0: one at the end.")
    keep_checkpoints: int = option(2, "How many checkpoints to keep; 0: all.")
    save: bool = option(True, "Write checkpoints.")
    load: str | None = option(None, "Start from this run's or checkpoint's state (any layout) when RUN_DIR has none.")
    init_from: str | None = option(None, "Hugging Face folder whose model and weights a new run starts from.")
    vision_from: str | None = option(None, "Hugging Face folder for the vision tower alone; the projector is new.")
    language_from: str | None = option(None, "Hugging Face folder for the language model alone.")


@dataclass(frozen=True)
class EvaluationConfig:
    eval_interval: int = option(0, "Iterations between evaluations; 0: only at the end, where the source has one.")
    eval_samples: int = option(96, "Questions of each kind in an evaluation.")


@dataclass(frozen=True)
class LoggingConfig:
    log_interval: int = option(1, "Iterations between progress lines; metrics.jsonl has every iteration.")
    tensorboard: bool = option(True, "Write RUN_DIR/tensorboard.")
    profile: bool = option(False, "Trace some iterations: RUN_DIR/profile/rank-N.json.gz and the costliest kernels.")
    profile_step_start: int = option(10, "Profile: iterations that pass before the trace begins.")
    profile_step_end: int = option(12, "Profile: the last iteration of the trace.")
    profile_ranks: tuple[int, ...] = option((0,), "Profile: ranks that trace.")


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
