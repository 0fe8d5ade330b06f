"""Llama, Mistral, Qwen2 and Qwen3 of Transformers, and ours: the same logits and gradients from the same weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers

from megavlm.arch.layers import EMBEDDING, layer_names
from megavlm.config.schema import Config, LanguageConfig, ModelConfig
from megavlm.families.shared.family import NamePrefixes
from megavlm.families.shared.language import language_table
from megavlm.rules.defaults import resolve_model
from tests.support.gates import hold
from tests.support.harness import (
    OUTPUT_TOLERANCE,
    Single,
    assert_same,
    assert_same_gradients,
    difference,
    gradients_of,
    load,
    parameters_of,
    randomize,
    text_batch,
)
from tests.support.mapping import shapes_of, to_ours

VOCABULARY = 61
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "attn_implementation": "eager",
}


@dataclass(frozen=True)
class Case:
    theirs: transformers.PreTrainedConfig
    ours: LanguageConfig


def ours(**options: Any) -> LanguageConfig:
    return LanguageConfig(num_layers=3, hidden_size=48, ffn_hidden_size=80, **options)


def rope(base: float) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": base}


CASES = {
    "llama": Case(
        transformers.LlamaConfig(
            **COMMON, num_attention_heads=4, num_key_value_heads=4, rms_norm_eps=1e-5, rope_parameters=rope(1e4)
        ),
        ours(num_attention_heads=4, norm_epsilon=1e-5),
    ),
    "llama-gqa": Case(
        transformers.LlamaConfig(
            **COMMON, num_attention_heads=6, num_key_value_heads=2, rms_norm_eps=1e-5, rope_parameters=rope(5e5)
        ),
        ours(num_attention_heads=6, num_query_groups=2, norm_epsilon=1e-5, rotary_base=5e5),
    ),
    "mistral": Case(
        transformers.MistralConfig(
            **COMMON,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=20,
            rms_norm_eps=1e-5,
            rope_parameters=rope(1e6),
            sliding_window=None,
        ),
        ours(num_attention_heads=4, num_query_groups=2, kv_channels=20, norm_epsilon=1e-5, rotary_base=1e6),
    ),
    "qwen2": Case(
        transformers.Qwen2Config(
            **COMMON,
            num_attention_heads=4,
            num_key_value_heads=2,
            rms_norm_eps=1e-6,
            rope_parameters=rope(1e6),
            tie_word_embeddings=True,
        ),
        ours(num_attention_heads=4, num_query_groups=2, rotary_base=1e6, add_qkv_bias=True, tie_embeddings=True),
    ),
    "qwen3": Case(
        transformers.Qwen3Config(
            **COMMON,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            rms_norm_eps=1e-6,
            rope_parameters=rope(1e6),
        ),
        ours(num_attention_heads=4, num_query_groups=2, kv_channels=16, rotary_base=1e6, qk_norm=True),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_language_model_equals_transformers(name: str, single: Single) -> None:
    case = CASES[name]
    theirs = randomize(transformers.AutoModelForCausalLM.from_config(case.theirs), seed=1)
    config = Config(model=resolve_model(ModelConfig(language=case.ours)))
    names = layer_names(config.model)
    chunk = single.chunk(config, names[names.index(EMBEDDING) :], vocab_size=VOCABULARY)
    table, shapes = language_table(config.model, NamePrefixes(language="model.")), shapes_of(chunk)
    load(chunk, to_ours(parameters_of(theirs), table, shapes))

    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(VOCABULARY, (2, 17), generator=generator)
    direction = torch.randn(2, 17, VOCABULARY, generator=generator)
    chunk.set_input_tensor(torch.zeros(1, 1, 48))  # the features of an imageless micro-batch
    logits, expected = chunk(text_batch(tokens), logits=True), theirs(tokens).logits
    assert_same(logits, expected, tolerance=OUTPUT_TOLERANCE, what="logits")
    hold(case.theirs.model_type, "logits", difference(logits, expected, "logits"))

    (logits * direction).sum().backward()
    (expected * direction).sum().backward()
    expected_gradients = to_ours(gradients_of(theirs), table, shapes)
    assert_same_gradients(gradients_of(chunk), expected_gradients, family=case.theirs.model_type)
