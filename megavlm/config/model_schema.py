"""Options of a model: its parts, frozen parts and adapters, and the objective."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from megavlm.config.experts_schema import ExpertsConfig
from megavlm.config.option import (
    BELOW_HALF,
    EXPERTS,
    MODEL,
    Below1,
    Count,
    Natural,
    Needs,
    NotNegative,
    Positive,
    key_only,
    option,
)
from megavlm.config.registry import ConnectorSections, ObjectiveSections
from megavlm.config.transformer_schema import LanguageConfig
from megavlm.config.vision_schema import AUDIO, AudioConfig, VisionConfig

ADAPTERS = Needs(lambda config: config.lora.rank > 0, "without adapters", "add --lora-rank 16")
PAIRED = ("dpo", "ipo", "orpo", "simpo")  # objectives that compare two answers to a prompt
PREFERENCES = (*PAIRED, "kto", "reward")  # … or rate one, or train a head that scores answers
EMBEDDINGS = Needs(
    lambda config: config.model.objective.kind not in ("next-token", *PREFERENCES),
    "without embeddings",
    "add --objective contrastive",
)
of_embeddings = partial(option, needs=EMBEDDINGS)
ANSWERS = Needs(
    lambda config: config.model.objective.kind in (*PAIRED, "kto"), "without log-ratios", "add --objective dpo"
)


def _with_objective(*kinds: str) -> Needs:
    """Return the condition of options that have an effect only with these objectives."""
    remedy = f"use --objective {kinds[0]}"
    return Needs(lambda config: config.model.objective.kind in kinds, "with another objective", remedy)


SMOOTHED = _with_objective("dpo", "simpo")
PREDICTORS = Needs(
    lambda config: config.model.language.mtp_layers > 0,
    "without layers that predict further tokens",
    "add --set model.language.mtp_layers=1",
)


@dataclass(frozen=True)
class ProjectorConfig:
    """The projector, which maps vision features to language embeddings."""

    kind: str = option(
        "mlp",
        "Type of the projector: one linear layer, an MLP (linear, GELU, linear), deep_mlp (linear and GELU, then an "
        "MLP: Muse-Glimmer), swiglu (a SwiGLU MLP: Cohere), gated (a linear layer, norm and GELU, then a SwiGLU MLP: "
        "GLM-4.1V), or a connector with options of its own (docs/models.md).",
        flag="--projector-kind",
        point="connectors",
    )
    hidden_size: Count = option(None, "Inner width of the projector's MLP; default: model.language.hidden_size.")
    pixel_shuffle: Count = option(
        1,
        "Merge each N×N block of neighbouring patches into one feature before the projector; of them, "
        "model.vision.merger_layer merges 2×2 within the tower.",
    )
    merge: Literal["concatenate", "average", "standardized_average", "convolution"] = option(
        "concatenate",
        "How the patches of a block of model.projector.pixel_shuffle become one feature: concatenated, averaged (Gemma "
        "3; Gemma 4: then times √channels, and standardized by given numbers that are not trained), or by a learned "
        "convolution over the block (Mistral 3).",
    )
    merge_channels: Count | None = option(
        None, "Channels of a feature after model.projector.merge convolution; default: those of a patch."
    )
    merge_bias: bool = option(False, "Add a bias to model.projector.merge convolution (GLM-4.1V).")
    input_norm: bool = option(False, "Norm before the projector (InternVL).")
    norm_before_merge: bool = option(
        False,
        "Apply the norm layer of model.projector.input_norm to single patches (Mistral 3); off: to merged features.",
    )
    normalization: Literal["LayerNorm", "RMSNorm", "UnitRMSNorm"] = option(
        "LayerNorm", "Type of the projector's norm layers; UnitRMSNorm: no weights."
    )
    norm_epsilon: Positive = option(1e-5, "Epsilon of the norm layer before the projector's first linear layer.")
    apply_layernorm_1p: bool = option(
        False,
        "Multiply by 1 + weight in the projector's norm layers, instead of by the weight (Gemma).",
    )
    bias: bool = option(True, "Add biases to the projector's linear layers.")
    anyres_max_tiles: Count | None = option(
        None,
        "Split images into tiles, join the tiles' features into one map with a learned newline after each row, "
        "and downsample the map to at most this many tiles' features (LLaVA-OneVision's anyres_max_N); default: "
        "images are not split.",
    )
    connectors: ConnectorSections = field(default_factory=ConnectorSections)


@dataclass(frozen=True)
class ObjectiveConfig:
    """The objective: output of the last layer (logits or embeddings), and the loss."""

    kind: Literal["next-token", "contrastive", "sigmoid", "dpo", "ipo", "orpo", "simpo", "kto", "reward"] = option(
        "next-token",
        "Loss: next-token, of query and document embeddings contrastive (InfoNCE) or sigmoid (SigLIP), of a chosen "
        "and a rejected answer dpo, ipo, orpo or simpo, or of answers labelled good or bad kto (z₀ is 0); reward: a "
        "head scores both answers (Bradley-Terry).",
        flag="--objective",
        point="objectives",
    )
    pooling: Literal["last", "mean", "chat"] = of_embeddings(
        "last",
        "Embedding of a text: the state of its end token, the mean over its tokens, or, with the text as a user's turn "
        "of the chat template and its instruction as the system's, the state before an answer (Qwen3-VL-Embedding).",
        flag="--pooling",
    )
    temperature: Positive = of_embeddings(
        None, "Embeddings: divisor of cosines; if learned, its initial value. Default: 0.05, sigmoid: 0.1."
    )
    learn_temperature: bool = key_only(
        None, "Train the temperature; default: with --objective sigmoid.", needs=EMBEDDINGS
    )
    sigmoid_bias: float = key_only(
        -10.0,
        "Objective sigmoid: initial value of the learned bias of scores.",
        needs=(EMBEDDINGS, _with_objective("sigmoid")),
    )
    symmetric: bool = key_only(
        True,
        "Objective contrastive: also find the query of a document among all queries; off: only documents of queries.",
        needs=(EMBEDDINGS, _with_objective("contrastive")),
    )
    matryoshka_widths: tuple[Count, ...] = key_only(
        (),
        "Embeddings: also apply the loss to the first N channels for each N given (Matryoshka), all with weight 1; "
        "default: only to all channels.",
        needs=EMBEDDINGS,
    )
    mtp_loss_scaling_factor: Positive = key_only(
        0.1,
        "Multi-token prediction: a step minimises loss + this × mtp_loss of metrics.jsonl, which is the mean over the "
        "layers of model.language.mtp_layers.",
        needs=PREDICTORS,
    )
    beta: Positive = key_only(
        None,
        "Preferences: weight of log-ratios of answers, with orpo of the odds ratio; default: 0.1, simpo: 2.",
        needs=ANSWERS,
    )
    label_smoothing: float = key_only(
        0.0,
        "Objectives dpo and simpo: assumed share of pairs with swapped labels (cDPO, not TRL's robust).",
        valid=BELOW_HALF,
        needs=(ANSWERS, SMOOTHED),
    )
    simpo_gamma: NotNegative = key_only(
        0.5, "Objective simpo: target margin of the loss.", needs=(ANSWERS, _with_objective("simpo"))
    )
    rpo_alpha: NotNegative = key_only(
        0.0,
        "Preferences of pairs: factor of the chosen answer's mean cross entropy per token in the loss.",
        needs=(
            ANSWERS,
            Needs(lambda config: config.model.objective.kind in PAIRED, "with --objective kto", "use --objective dpo"),
        ),
    )
    desirable_weight: Positive = key_only(
        1.0,
        "Objective kto: weight of the loss of good answers, where that of bad ones is 1.",
        needs=(ANSWERS, _with_objective("kto")),
    )
    center_rewards: NotNegative = key_only(
        0.0,
        "Objective reward: factor of the squared sum of a pair's scores in the loss, which keeps scores near 0.",
        needs=_with_objective("reward"),
    )
    query_prefix: str = of_embeddings("", "Embeddings: text, such as an instruction, put before each query.")
    document_prefix: str = of_embeddings("", "Embeddings: text before each document.")
    losses: ObjectiveSections = field(default_factory=ObjectiveSections)


@dataclass(frozen=True)
class ModelConfig:
    published: str | None = option(
        None,
        "Name of a published model whose sizes are the defaults of this section (megavlm plan --help lists them); "
        "given weights keep their sizes; default: none.",
        flag="--published-model",
    )
    audio: AudioConfig = field(default_factory=AudioConfig)
    vision: VisionConfig = field(default_factory=VisionConfig)
    projector: ProjectorConfig = field(default_factory=ProjectorConfig)
    language: LanguageConfig = field(default_factory=LanguageConfig)
    experts: ExpertsConfig = field(default_factory=ExpertsConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    image_token: Natural | None = option(
        None, "Token id whose positions receive the image features; default: the tokenizer's image token."
    )
    video_token: Natural | None = key_only(
        None, "Token id whose positions receive the features of videos; default: the model's (without one: no videos)."
    )
    audio_token: Natural | None = key_only(None, "Token id of sounds; default: the model's.", needs=AUDIO)
    video_steps_per_second: Positive | None = key_only(
        None,
        "Time steps of M-RoPE per second of a video (Qwen2.5-VL); default: one step for each group of frames that "
        "share patches (Qwen2-VL).",
    )
    canvas_tokens: tuple[Natural, ...] = key_only(
        (),
        "Token ids around the slices of an image, that before a slice first: M-RoPE lays image and slices out on one "
        "canvas (MiniCPM-V 4.7); default: each slice is a separate image.",
        needs=Needs(
            lambda config: bool(config.model.language.mrope_section),
            "without M-RoPE",
            "set model.language.mrope_section",
        ),
    )
    init_method_std: Positive = option(0.02, "Standard deviation of the normal distribution of initial weights.")
    attention_dropout: Below1 = option(0.0, "Dropout probability of attention probabilities.")
    hidden_dropout: Below1 = option(0.0, "Dropout probability of the output of each residual branch.")
    freeze: tuple[Literal["vision", "audio", "projector", "language"], ...] | None = option(
        None, "Parts to freeze; default: none, LoRA: those without adapters.", common=MODEL
    )


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters (Hu et al. 2021) as in PEFT; all other weights of a part with adapters are frozen."""

    rank: Natural = option(0, "Rank of the LoRA adapters; 0: no adapters.", common=MODEL)
    alpha: Positive = option(16.0, "LoRA alpha: the output of adapters is multiplied by alpha / rank.", needs=ADAPTERS)
    dropout: Below1 = option(0.0, "Dropout probability of the input of adapters.", needs=ADAPTERS)
    targets: tuple[str, ...] = option(
        ("language",),
        "Layers with LoRA adapters: a part (language, vision, audio), a linear layer (q_proj), or a pattern with * and "
        "?; routed experts only by their name (experts).",
        needs=ADAPTERS,
    )
    train_router: bool = key_only(
        False, "Train the routers of experts besides adapters; off: they are frozen.", needs=(ADAPTERS, EXPERTS)
    )
