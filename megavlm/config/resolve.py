"""Fill in the defaults that follow from other options, once; all later code reads plain values."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megavlm.config.schema import Config, ModelConfig
from megavlm.config.start_defaults import with_start_defaults


def resolve(config: Config, *, vocab_size: int | None = None) -> Config:
    """Return the configuration with a value for each option whose default follows from other options.

    `vocab_size` is the tokenizer's size, the default of `--language-vocab-size`. Given values stay, so that resolving
    again changes nothing. Defaults that follow from the layout or the device are not filled in here, because the
    planner varies both: `layout_rules.overlapped` and `device_defaults` do that.
    """
    config = with_start_defaults(config)
    optimizer = _filled(config.optimizer, lr_decay_iters=config.train.train_iters)
    if optimizer.lr_decay_style == "WSD":
        optimizer = _filled(optimizer, lr_wsd_decay_iters=max(1, optimizer.lr_decay_iters // 10))
    return replace(
        config,
        model=resolve_model(config.model, vocab_size=vocab_size),
        optimizer=optimizer,
        data=_filled(config.data, kind="files" if config.data.datasets else "synthetic"),
    )


def resolve_model(model: ModelConfig, *, vocab_size: int | None = None) -> ModelConfig:
    """Return the model with a value for each size whose default follows from other sizes."""
    language = _filled(
        model.language,
        num_query_groups=model.language.num_attention_heads,
        kv_channels=model.language.hidden_size // model.language.num_attention_heads,
        vocab_size=vocab_size,
    )
    return replace(model, language=language, projector=_filled(model.projector, hidden_size=language.hidden_size))


def data_kind(config: Config) -> str:
    """Return `--data` or its default, for code that runs before `resolve`."""
    return resolve(config).data.kind


def is_set(section: Any, name: str) -> bool:
    """Return whether a field has a value, for code that runs before `resolve`."""
    return getattr(section, name) is not None


def _filled(section: Any, **defaults: Any) -> Any:
    """Return the section with the defaults of its fields that are not set."""
    return replace(section, **{name: value for name, value in defaults.items() if not is_set(section, name)})
