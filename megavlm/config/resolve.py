"""Fill in the defaults that follow from other options, once; all later code reads plain values."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megavlm.config.needs import data_kind, has_validation
from megavlm.config.registry import ConnectorSections, registered
from megavlm.config.schema import Config, ModelConfig
from megavlm.config.start_defaults import steps, with_start_defaults


def resolve(config: Config, *, vocab_size: int | None = None) -> Config:
    """Return the configuration with a value for each option whose default follows from other options.

    `vocab_size` is the tokenizer's size, the default of `model.language.vocab_size`. Given values stay, so that
    resolving again changes nothing. Defaults that follow from the layout or the device are not filled in here, because
    the planner varies both: `layout_rules.overlapped` and `device_defaults` do that. With `--epochs`, the number of
    steps, and what follows from it, is filled in where the data are known (`run_rules.with_train_iters`).
    """
    train = _filled(config.train, train_iters=steps(config))
    optimizer = _filled(config.optimizer, lr_decay_iters=train.train_iters)
    if is_set(optimizer, "lr_decay_iters"):
        if optimizer.lr_decay_style == "WSD":
            optimizer = _filled(optimizer, lr_wsd_decay_iters=max(1, optimizer.lr_decay_iters // 10))
        if optimizer.lr_warmup_fraction is not None:
            warmup = int(optimizer.lr_warmup_fraction * optimizer.lr_decay_iters)
            optimizer = replace(optimizer, lr_warmup_iters=warmup, lr_warmup_fraction=None)
    config = with_start_defaults(replace(config, train=train, optimizer=optimizer))
    intervals = {"eval_interval": config.checkpoint.save_interval} if has_validation(config) else {}
    return replace(
        config,
        model=resolve_model(config.model, vocab_size=vocab_size),
        optimizer=_filled(config.optimizer, **config.optimizer.rule.defaults(config.precision.dtype)),
        evaluation=_filled(config.evaluation, **intervals),
        data=_filled(config.data, kind=data_kind(config)),
    )


def resolve_model(model: ModelConfig, *, vocab_size: int | None = None) -> ModelConfig:
    """Return the model with a value for each size whose default follows from other sizes."""
    has_experts = model.experts.num_experts > 0
    language = _filled(
        model.language,
        num_query_groups=model.language.num_attention_heads,
        kv_channels=model.language.hidden_size // model.language.num_attention_heads,
        vocab_size=vocab_size,
    )
    objective = model.objective
    if objective.kind != "next-token":
        sigmoid = objective.kind == "sigmoid"
        objective = _filled(objective, temperature=0.1 if sigmoid else 0.05, learn_temperature=sigmoid)
    model = _with(
        model,
        language=language,
        objective=objective,
        projector=_filled(model.projector, hidden_size=language.hidden_size),
        experts=_filled(model.experts, ffn_hidden_size=language.ffn_hidden_size) if has_experts else model.experts,
    )
    connector: Any = registered("connectors")[model.projector.kind]
    if connector.options is None:
        return model
    sections = ConnectorSections({**model.projector.connectors, connector.name: connector.resolved(model)})
    return replace(model, projector=replace(model.projector, connectors=sections))


def is_set(section: Any, name: str) -> bool:
    """Return whether a field has a value, for code that runs before `resolve`."""
    return getattr(section, name) is not None


def _filled(section: Any, **defaults: Any) -> Any:
    """Return the section with the defaults of its fields that are not set; the section itself if all are."""
    missing = {name: value for name, value in defaults.items() if not is_set(section, name)}
    return replace(section, **missing) if missing else section


def _with(section: Any, **values: Any) -> Any:
    """Return the section with these values; the section itself if it has them: a search resolves what is resolved tens
    of thousands of times.
    """
    return (
        section
        if all(getattr(section, name) is value for name, value in values.items())
        else replace(section, **values)
    )
