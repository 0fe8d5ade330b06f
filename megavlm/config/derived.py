"""Sizes of a model that are computed from other options if they are not given."""

from __future__ import annotations

from dataclasses import replace

from megavlm.config.schema import Config, LanguageConfig, ModelConfig


def with_vocab_size(config: Config, vocab_size: int) -> Config:
    """Return the configuration with the model's vocabulary: as given, or `vocab_size`, the tokenizer's."""
    if config.model.language.vocab_size is not None:
        return config
    language = replace(config.model.language, vocab_size=vocab_size)
    return replace(config, model=replace(config.model, language=language))


def vocab_size(language: LanguageConfig) -> int:
    """Return the vocabulary size; the caller must have filled in the tokenizer's size if it was not given."""
    assert language.vocab_size is not None, "the vocabulary's size is known once the tokenizer is: with_vocab_size"
    return language.vocab_size


def query_groups(language: LanguageConfig) -> int:
    """Return the number of key/value heads: one for each query head unless given."""
    return language.num_query_groups or language.num_attention_heads


def projector_width(model: ModelConfig) -> int:
    """Return the channels between the projector's two layers: the language model's width unless given."""
    return model.projector.hidden_size or model.language.hidden_size
