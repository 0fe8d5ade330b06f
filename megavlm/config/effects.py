"""Options that have an effect only if another option is set, in one table.

An option that the user sets without effect is an error that names the missing option. An option that only a recipe sets
returns to its default instead.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, fields
from typing import Any

from megavlm.config.experts_schema import ExpertsConfig
from megavlm.config.fields import Option, options, value_at, with_values
from megavlm.config.lora import adapted_parts, frozen_parts, trained_whole
from megavlm.config.objective_schema import ObjectiveConfig
from megavlm.config.registry import registered
from megavlm.config.resolve import data_kind, has_validation
from megavlm.config.schema import Config, ProjectorConfig
from megavlm.config.start_defaults import is_start_default
from megavlm.config.update_rules import idle_options


@dataclass(frozen=True)
class Effect:
    """The `options` of `section` have an effect if `there(config)` is true."""

    section: str
    options: tuple[str, ...]
    there: Callable[[Config], bool]
    lacking: str  # completes "--option has no effect …"
    remedy: str


def _data(kind: str) -> Callable[[Config], bool]:
    return lambda config: data_kind(config) == kind


def _colocated(config: Config) -> bool:
    return config.placement.encoder == "colocated"


def _has_experts(config: Config) -> bool:
    return config.model.experts.num_experts > 0


def _trains_routers(config: Config) -> bool:
    return "language" in trained_whole(config) or (config.lora.train_router and "language" in adapted_parts(config))


def _trains(module: str) -> Callable[[Config], bool]:
    return lambda config: module not in frozen_parts(config) or module in adapted_parts(config)


_DELAYED = ("fp8_margin", "fp8_amax_history_len", "fp8_amax_compute_algo")

EFFECTS = (
    Effect(
        "evaluation",
        ("eval_interval", "eval_iters"),
        has_validation,
        "without validation data",
        "add --validation PATH or --validation-split 0.01",
    ),
    Effect(
        "evaluation",
        ("sample_interval",),
        has_validation,
        "without validation data, which have the prompts",
        "add --validation PATH or --validation-split 0.01",
    ),
    Effect(
        "evaluation",
        ("sample_count", "sample_max_new_tokens"),
        lambda config: has_validation(config) and config.evaluation.sample_interval > 0,
        "without answers",
        "add --sample-interval 100",
    ),
    Effect("evaluation", ("eval_samples",), _data("digits"), "except on digits", "use --data digits"),
    Effect(
        "data",
        ("images_per_sample", "image_sizes", "imageless_share", "imageless_samples", "answer_share"),
        _data("synthetic"),
        "except on synthetic data",
        "use --data synthetic",
    ),
    Effect(
        "data",
        (
            *("tokenizer", "chat_template", "train_on", "image_processor", "fast_image_resize", "max_image_pixels"),
            *("min_pixels", "max_pixels", "video_fps", "video_max_frames", "video_max_tokens"),
            *("vision_input", "channel_statistics"),
            *("shuffle", "packing", "packing_window", "balance", "max_bad_sample_rate", "worker_timeout"),
            *("validation", "validation_split"),
        ),
        _data("files"),
        "without --datasets",
        "name your data sets with --datasets",
    ),
    Effect("train", ("epochs",), _data("files"), "without --datasets", "name your data sets with --datasets"),
    Effect("data", ("packing_window",), lambda config: config.data.packing, "with --no-packing", "use --packing"),
    Effect(
        "parallel",
        ("cp_comm_type",),
        lambda config: config.parallel.context_parallel_size > 1,
        "without context parallelism",
        "add --cp 2",
    ),
    Effect(
        "parallel",
        ("expert_model_parallel_size", "expert_tensor_parallel_size", "moe_token_dispatcher_type"),
        _has_experts,
        "without experts",
        "add --num-experts 8",
    ),
    Effect(
        "model.experts",
        tuple(field.name for field in fields(ExpertsConfig) if field.name != "num_experts"),
        _has_experts,
        "without experts",
        "add --num-experts 8",
    ),
    Effect(
        "model.experts",
        ("shared_gate",),
        lambda config: config.model.experts.shared_ffn_hidden_size is not None,
        "without a shared expert",
        "add --moe-shared-expert-intermediate-size",
    ),
    Effect(
        "model.experts",
        ("aux_loss_coeff", "z_loss_coeff"),
        _trains_routers,
        "with a frozen language model, whose routers do not train",
        "do not freeze language, or add --lora-train-router to adapters",
    ),
    Effect(
        "model.experts",
        ("router_pre_softmax",),
        lambda config: config.model.experts.router_score_function == "softmax",
        "with sigmoid scores",
        "use --moe-router-score-function softmax",
    ),
    Effect(
        "model.experts",
        ("router_bias_update_rate",),
        lambda config: config.model.experts.router_enable_expert_bias,
        "without a bias",
        "add --moe-router-enable-expert-bias",
    ),
    Effect(
        "model.objective",
        tuple(field.name for field in fields(ObjectiveConfig) if field.name not in ("kind", "losses")),
        lambda config: config.model.objective.kind != "next-token",
        "without embeddings",
        "add --objective contrastive",
    ),
    Effect(
        "model.objective",
        ("symmetric",),
        lambda config: config.model.objective.kind == "contrastive",
        "with another objective",
        "use --objective contrastive",
    ),
    Effect(
        "model.objective",
        ("sigmoid_bias",),
        lambda config: config.model.objective.kind == "sigmoid",
        "with another objective",
        "use --objective sigmoid",
    ),
    Effect(
        "parallel",
        ("vision_tensor_model_parallel_size",),
        _colocated,
        "without a colocated encoder",
        "add --placement colocated",
    ),
    Effect(
        "placement",
        ("encoder_chunk_patches", "encoder_keep_chunks"),
        _colocated,
        "without a colocated encoder",
        "add --placement colocated",
    ),
    Effect(
        "model.vision",
        ("new_channels",),
        lambda config: bool(config.checkpoint.init_from or config.checkpoint.vision_from),
        "without given weights of a vision encoder",
        "name them with --init-from or --vision-from",
    ),
    Effect(
        "model.vision",
        ("rotary_interleaved",),
        lambda config: config.model.vision.position_embedding != "learned",
        "without rotary positions",
        "use --vision-position-embedding rope2d",
    ),
    Effect(
        "model.projector",
        ("normalization", "apply_layernorm_1p"),
        lambda config: (
            config.model.projector.input_norm
            or config.model.projector.kind == "gated"
            or bool(config.model.vision.deepstack_layers)
        ),
        "without a norm layer",
        "add --projector-input-norm",
    ),
    Effect(
        "model.projector",
        ("norm_epsilon",),
        lambda config: config.model.projector.input_norm or config.model.projector.kind == "gated",
        "without a norm layer",
        "add --projector-input-norm",
    ),
    Effect(
        "model.projector",
        ("norm_before_merge",),
        lambda config: config.model.projector.input_norm or bool(config.model.vision.deepstack_layers),
        "without a norm layer",
        "add --projector-input-norm",
    ),
    Effect(
        "model.projector",
        ("merge",),
        lambda config: config.model.projector.pixel_shuffle > 1 or config.model.projector.merge == "convolution",
        "without blocks of patches",
        "set --projector-pixel-shuffle",
    ),
    Effect(
        "model.projector",
        ("merge_channels", "merge_bias"),
        lambda config: config.model.projector.merge == "convolution",
        "without a convolution",
        "use --projector-merge convolution",
    ),
    Effect(
        "model.vision",
        ("norm_before_position",),
        lambda config: config.model.vision.pre_norm,
        "without a norm layer",
        "add --vision-pre-norm",
    ),
    Effect(
        "model.language",
        ("full_attention_layers", "local_rotary_base"),
        lambda config: config.model.language.window_size is not None,
        "without a sliding window",
        "add --language-window-size",
    ),
    Effect(
        "placement",
        ("vision_cache_size",),
        lambda config: config.placement.vision_cache is not None,
        "without a cache",
        "add --vision-cache DIR",
    ),
    Effect(
        "lora",
        ("alpha", "dropout", "targets"),
        lambda config: config.lora.rank > 0,
        "without adapters",
        "add --lora-rank 16",
    ),
    Effect(
        "lora",
        ("train_router",),
        lambda config: _has_experts(config) and "language" in adapted_parts(config),
        "without adapters in a language model with experts",
        "name some of its layers in --lora-targets",
    ),
    Effect(
        "optimizer",
        ("initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis"),
        lambda config: config.precision.dtype == "fp16",
        "without a loss scale, which only fp16 has",
        "add --precision fp16",
    ),
    Effect(
        "evaluation",
        ("eval_ema",),
        lambda config: config.optimizer.ema_decay > 0,
        "without averaged weights",
        "add --ema-decay 0.999",
    ),
    Effect(
        "optimizer",
        ("qk_clip_threshold", "qk_clip_alpha"),
        lambda config: config.optimizer.qk_clip,
        "without --qk-clip",
        "add it",
    ),
    *(
        Effect("optimizer", (f"{module}_lr",), _trains(module), f"with --freeze {module}", f"do not freeze {module}")
        for module in ("vision", "projector", "language")
    ),
    Effect(
        "precision",
        ("fp8_recipe", "fp8_parts", "first_last_layers_bf16", "fp8_param_gather", *_DELAYED),
        lambda config: config.precision.fp8 != "none",
        "without FP8",
        "add --fp8 hybrid",
    ),
    Effect(
        "precision",
        _DELAYED,
        lambda config: config.precision.fp8_recipe == "delayed",
        "without delayed scaling",
        "use --fp8-recipe delayed",
    ),
    Effect(
        "precision",
        ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"),
        lambda config: config.precision.first_last_layers_bf16,
        "without --first-last-layers-bf16",
        "add it",
    ),
    Effect(
        "logging",
        ("profile_step_start", "profile_step_end", "profile_ranks"),
        lambda config: config.logging.profile,
        "without a profile",
        "add --profile",
    ),
    Effect(
        "logging",
        ("tracker_project", "tracker_run_name"),
        lambda config: bool(config.logging.tracker),
        "without a tracker",
        "add --tracker wandb or mlflow",
    ),
    Effect(
        "checkpoint",
        ("save_interval", "keep_checkpoints", "keep_every", "keep_best", "async_save"),
        lambda config: config.checkpoint.save,
        "with --no-save",
        "leave --no-save out",
    ),
    Effect(
        "checkpoint",
        ("keep_best_mode",),
        lambda config: config.checkpoint.keep_best is not None,
        "without --keep-best",
        "add --keep-best loss",
    ),
    Effect(
        "checkpoint",
        ("keep_best",),
        lambda config: config.checkpoint.keep_checkpoints > 0,
        "with --keep-checkpoints 0, which keeps all",
        "set --keep-checkpoints to 1 or more",
    ),
)


# Defaults that say "off", which scripts may say of what they do not use (`--ep 1`).
_OFF = (None, False, 0, 1, (), "none")


def idle(config: Config, *, typed: Collection[tuple[str, ...]] = ()) -> Iterator[tuple[Option, Effect]]:
    """Yield the options that have no effect in this configuration, although they differ from their defaults, or their
    path was `typed` and the default is more than "off": `--lora-alpha 16` without a rank is meant to train adapters.
    """
    known = {option.key: option for option in options()}
    for effect in (*_of_names(config), *_of_rules(config), *EFFECTS):
        if effect.there(config):
            continue
        for name in effect.options:
            option = known[f"{effect.section}.{name}"]
            differs = value_at(config, option.path) != option.default and not is_start_default(config, option)
            if differs or (option.path in typed and option.default not in _OFF):
                yield option, effect


def _of_names(config: Config) -> Iterator[Effect]:
    """Yield what has an effect only where an option names it: sections of what is registered, and the options of the
    projector that its connector heeds.
    """
    for chooser in (option for option in options() if option.point is not None):
        said = value_at(config, chooser.path)
        for name in registered(str(chooser.point)):
            inside = [each for each in options() if each.path[-2] == name and each.section.startswith(chooser.section)]
            there = name in said if chooser.kind.many else name == said
            if inside and not there:
                leaves = tuple(each.path[-1] for each in inside)
                yield Effect(inside[0].section, leaves, _never, f"without {name}", f"use {chooser.flag} {name}")
    connector: Any = registered("connectors")[config.model.projector.kind]
    ignored = {field.name for field in fields(ProjectorConfig)} - {"kind", "connectors", *connector.reads}
    lacking = f"with --projector-kind {connector.name}"
    yield Effect("model.projector", tuple(sorted(ignored)), _never, lacking, "use another kind")


def _of_rules(config: Config) -> Iterator[Effect]:
    """Yield what has an effect only with another update rule."""
    for names, lacking, remedy in idle_options(config.optimizer.rule):
        yield Effect("optimizer", tuple(sorted(names)), _never, lacking, remedy)


def _never(config: Config) -> bool:
    return False


def options_have_an_effect(config: Config, *, typed: Collection[tuple[str, ...]] = ()) -> str | None:
    for option, effect in idle(config, typed=typed):
        flag = option.negations[0] if value_at(config, option.path) is False else option.flag
        return f"{flag} has no effect {effect.lacking}: {effect.remedy}, or leave {flag} out"
    return None


def without_idle(config: Config, given: Collection[tuple[str, ...]]) -> Config:
    """Return the configuration with idle options at their defaults, except those whose paths are `given`."""
    unasked = {option.path: option.default for option, _ in idle(config) if option.path not in given}
    return with_values(config, unasked)
