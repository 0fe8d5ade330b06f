"""Fill in defaults that depend on other options, once; all later code reads plain values.

A run with random weights is a toy or the start of a pretraining: large steps suit it, and the defaults let a laptop run
it. Large steps would destroy given weights: with them, the defaults are those published for fine-tuning. In the schema,
the default of these options is None, which shows whether the user has set them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from megavlm.arch.connector import connector_of
from megavlm.config.derived import has_vision
from megavlm.config.lora_config import PARTS, adapted_parts, frozen_parts, new_projector, trained_whole
from megavlm.config.model_schema import PREFERENCES
from megavlm.config.option import data_kind, filled, has_validation
from megavlm.config.registry import ConnectorSections
from megavlm.config.schema import Config, ModelConfig
from megavlm.rules.fields import Option, options, value_at, with_values

# Published learning rates: scripts/v1_5 of LLaVA (a projector trained with adapters 2e-5, a new projector alone 1e-3),
# the examples of LLaMA-Factory and ms-swift (all weights 1e-5, adapters 1e-4), LLaVA-OneVision (vision encoder 2e-6,
# all else 1e-5).
FULL, ENCODER, ADAPTERS, BESIDE_ADAPTERS, PROJECTOR = 1e-5, 2e-6, 1e-4, 2e-5, 1e-3
WARMUP = 0.03  # of the steps until the decay ends: LLaVA, InternVL3, Qwen2.5-VL
LENGTH = 8192  # tokens: InternVL2.5, Qwen2.5-VL; some ten images
SAVE = 500  # steps: LLaMA-Factory, ms-swift


@dataclass(frozen=True)
class StartDefault:
    """Defaults of an option for runs from random and from given weights; the functions take the run's options."""

    option: str  # "section.field"
    random: Any  # the value with random weights, or a function of the run's options
    given: Callable[[Config], tuple[Any, str]]  # with given weights: the value, and why
    applies: Callable[[Config], bool] = lambda config: True  # whether the option concerns the run's model


def starts_from_weights(config: Config) -> bool:
    """Return whether a run starts from weights that the user gave."""
    checkpoint = config.checkpoint
    return any((checkpoint.init_from, checkpoint.vision_from, checkpoint.language_from, checkpoint.load))


def learning_rate(config: Config) -> tuple[float, str]:
    if adapted_parts(config):
        return ADAPTERS, "published for LoRA adapters"
    if trained_whole(config) == ("projector",):
        return PROJECTOR, "published for training the projector alone"
    return FULL, "published for training all weights"


def part_rate(part: str) -> Callable[[Config], tuple[float | None, str]]:
    """Return a function that gives the default learning rate of a part and the reason; None means --lr: if --lr is
    given, or if the part is not trained whole.
    """

    def rate(config: Config) -> tuple[float | None, str]:
        whole, adapted = trained_whole(config), adapted_parts(config)
        trained = part in whole or (part == "vision" and "audio" in whole)  # --vision-lr is of all encoders
        if _given(config, "optimizer.lr") or not trained or (whole == ("projector",) and not adapted):
            return None, ""
        if part == "projector" and new_projector(config):
            return PROJECTOR, "the projector begins with random weights"
        if part == "vision":
            return ENCODER, "published for the vision encoder, which is trained more gently"
        return (BESIDE_ADAPTERS, "published for parts beside LoRA adapters") if adapted else (None, "")

    return rate


def steps(config: Config) -> int | None:
    """Return the number of optimizer steps; None with `--epochs`, until the samples of an epoch have been counted."""
    return config.train.train_iters or (100 if config.train.epochs is None else None)


def warmup(config: Config) -> tuple[int | None, str]:
    end = config.optimizer.lr_decay_iters or steps(config)
    if end is None or config.optimizer.lr_warmup_fraction is not None:
        return None, ""
    return round(WARMUP * end), f"{WARMUP:.0%} of the steps until the decay ends"


def length(config: Config) -> tuple[int, str]:
    longest = config.model.language.max_positions
    if longest is not None and longest < LENGTH:
        return longest, "the most positions of the language model"
    return LENGTH, "room for some ten images" if has_vision(config.model) else "usual for fine-tunes"


def save_interval(config: Config) -> tuple[int, str]:
    return (SAVE, "so that a failure costs at most as many steps") if config.checkpoint.save else (0, "with --no-save")


START_DEFAULTS = (
    StartDefault("model.freeze", frozen_parts, lambda config: (frozen_parts(config), "what has no adapters")),
    StartDefault("precision.dtype", "fp32", lambda config: ("bf16", "the type in which weights are published")),
    StartDefault("optimizer.lr", 1e-3, learning_rate),
    *(StartDefault(f"optimizer.{part}_lr", None, part_rate(part)) for part in PARTS),
    StartDefault("optimizer.lr_warmup_iters", 0, warmup),
    StartDefault("train.seq_length", 64, length),
    StartDefault("checkpoint.save_interval", 0, save_interval),
    StartDefault(
        "model.experts.router_bias_update_rate",
        1e-3,
        lambda config: (0.0, "Transformers leaves the bias as it is"),
        applies=lambda config: config.model.experts.router_enable_expert_bias,
    ),
)


def with_start_defaults(config: Config) -> Config:
    """Return the configuration with each unset option of `START_DEFAULTS` at its default."""
    unset = (default for default in START_DEFAULTS if value_at(config, _path(default)) is None)
    return with_values(config, {_path(default): _value(default, config)[0] for default in unset})


def with_values_of(config: Config, earlier: Config) -> Config:
    """Return the configuration with each unset option of `START_DEFAULTS` at its value in an `earlier` configuration.

    Data sets without a weight take the earlier run's weight: with another, its position in the data means other
    samples.
    """
    before, now = earlier.data.datasets, config.data.datasets
    if [each.path for each in before] == [each.path for each in now]:
        weights = [new.weight or old.weight for old, new in zip(before, now, strict=True)]
        datasets = tuple(replace(each, weight=weight) for each, weight in zip(now, weights, strict=True))
        config = replace(config, data=replace(config.data, datasets=datasets))
    unset = [default for default in START_DEFAULTS if value_at(config, _path(default)) is None]
    if _given(config, "optimizer.lr"):  # parts follow the given rate, not the earlier one
        unset = [default for default in unset if not default.option.endswith("_lr")]
    fraction = "optimizer.lr_warmup_fraction"
    if _given(config, fraction) and not _given(earlier, fraction):  # in place of the earlier number of steps
        unset = [default for default in unset if default.option != "optimizer.lr_warmup_iters"]
    return with_values(config, {_path(default): value_at(earlier, _path(default)) for default in unset})


def is_start_default(config: Config, option: Option) -> bool:
    """Return whether an option is in `START_DEFAULTS` and has its default for this configuration."""
    value = value_at(config, option.path)
    return any(default.option == option.key and _value(default, config)[0] == value for default in START_DEFAULTS)


def start_table(config: Config, *, asked: Config | None = None) -> str:
    """Return a text table of the options of `START_DEFAULTS`, with the value and origin of each.

    `asked` is the configuration before values of the resumed run were filled in.
    """
    lines = []
    for option, value, origin in _origins(config, asked or config):
        shown = f"{value:g}" if isinstance(value, float) else " ".join(value) if option.kind.many else str(value)
        lines.append(f"{option.name:18} {shown:>8}  {origin}")
    return "\n".join(lines)


def _origins(config: Config, asked: Config) -> Iterator[tuple[Option, Any, str]]:
    known = {option.key: option for option in options()}
    for default in START_DEFAULTS:
        path = _path(default)
        if (value := value_at(config, path)) is not None:
            origin = "given" if value_at(asked, path) is not None else "as this run began"
        else:
            value, why = _value(default, config)
            start = "default for given weights" if starts_from_weights(config) else "default for random weights"
            origin = f"{start}: {why}" if why else start
        if value not in (None, ()):
            yield known[default.option], value, origin


def _given(config: Config, key: str) -> bool:
    return value_at(config, key.split(".")) is not None


def _path(default: StartDefault) -> tuple[str, ...]:
    return tuple(default.option.split("."))


def _value(default: StartDefault, config: Config) -> tuple[Any, str]:
    if not default.applies(config):
        return None, ""
    if starts_from_weights(config):
        return default.given(config)
    return default.random(config) if callable(default.random) else default.random, ""


def resolve(config: Config, *, vocab_size: int | None = None) -> Config:
    """Return the configuration with a value for each unset option whose default depends on other options.
    `vocab_size` is the tokenizer's size, the default of `model.language.vocab_size`. Given values stay, so that
    resolving again changes nothing. Defaults that follow from the layout or the device are not filled in here, because
    the planner varies both: `derived.overlapped` and `with_device_defaults` do that. With `--epochs`, the number of
    steps and its dependent options are filled in once the data are known (`training_rules.with_train_iters`).
    """
    train = filled(config.train, train_iters=steps(config))
    optimizer = filled(config.optimizer, lr_decay_iters=train.train_iters)
    if is_set(optimizer, "lr_decay_iters"):
        if optimizer.lr_decay_style == "WSD":
            optimizer = filled(optimizer, lr_wsd_decay_iters=max(1, optimizer.lr_decay_iters // 10))
        if optimizer.lr_warmup_fraction is not None:
            warmup = int(optimizer.lr_warmup_fraction * optimizer.lr_decay_iters)
            optimizer = replace(optimizer, lr_warmup_iters=warmup, lr_warmup_fraction=None)
    config = with_start_defaults(replace(config, train=train, optimizer=optimizer))
    intervals = {"eval_interval": config.checkpoint.save_interval} if has_validation(config) else {}
    return replace(
        config,
        model=resolve_model(config.model, vocab_size=vocab_size),
        optimizer=config.optimizer.resolved(config.precision.dtype),
        evaluation=filled(config.evaluation, **intervals),
        data=filled(config.data, kind=data_kind(config)),
    )


def resolve_model(model: ModelConfig, *, vocab_size: int | None = None) -> ModelConfig:
    """Return the model with a value for each unset size whose default depends on other sizes."""
    has_experts = model.experts.num_experts > 0
    language = filled(
        model.language,
        num_query_groups=model.language.num_attention_heads,
        kv_channels=model.language.hidden_size // model.language.num_attention_heads,
        vocab_size=vocab_size,
    )
    objective = model.objective
    if objective.kind in PREFERENCES:
        objective = filled(objective, beta=2.0 if objective.kind == "simpo" else 0.1)
    elif objective.kind != "next-token":
        sigmoid = objective.kind == "sigmoid"
        objective = filled(objective, temperature=0.1 if sigmoid else 0.05, learn_temperature=sigmoid)
    model = replace(
        model,
        language=language,
        objective=objective,
        projector=filled(model.projector, hidden_size=language.hidden_size),
        experts=filled(model.experts, ffn_hidden_size=language.ffn_hidden_size) if has_experts else model.experts,
    )
    connector = connector_of(model.projector)
    if connector.options is None:
        return model
    sections = ConnectorSections({**model.projector.connectors, connector.name: connector.resolved(model)})
    return replace(model, projector=replace(model.projector, connectors=sections))


def is_set(section: Any, name: str) -> bool:
    """Return whether a field has a value, for code that runs before `resolve`."""
    return getattr(section, name) is not None


def with_device_defaults(config: Config, *, on_gpu: bool) -> Config:
    """Return the configuration with the device's default of `--encoder-chunk-patches`, if the encoder is colocated."""
    if config.placement.encoder != "colocated":
        return config
    chunk = chunk_patches(config, on_gpu=on_gpu)
    return replace(config, placement=replace(config.placement, encoder_chunk_patches=chunk))


def chunk_patches(config: Config, *, on_gpu: bool) -> int:
    """Return the maximum number of patches per pass of a colocated encoder. The default is larger on a GPU: it computes
    a layer of 4,096 patches in less time than the host takes to launch the layer.
    """
    given = config.placement.encoder_chunk_patches
    return given if given is not None else 16384 if on_gpu else 4096
