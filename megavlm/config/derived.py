"""Sizes of a model that are computed from other options if they are not given."""

from __future__ import annotations

from megavlm.config.schema import LanguageConfig, ModelConfig


def vocab_size(language: LanguageConfig) -> int:
    """Return the vocabulary size; the caller must have filled in the tokenizer's size if it was not given."""
    assert language.vocab_size is not None, "the vocabulary's size is known once the tokenizer is: config.resolve"
    return language.vocab_size


def query_groups(language: LanguageConfig) -> int:
    """Return the number of key/value heads: one for each query head unless given."""
    return language.num_query_groups or language.num_attention_heads


def projector_width(model: ModelConfig) -> int:
    """Return the channels between the projector's two layers: the language model's width unless given."""
    return model.projector.hidden_size or model.language.hidden_size
