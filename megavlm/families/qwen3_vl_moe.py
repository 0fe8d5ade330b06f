"""Qwen3-VL with a mixture of experts in each language layer (Qwen3-MoE's).

Published files hold the matrices of experts transposed. Transformers transposes a tensor that does not fit, and saves
what it loaded as it has it: files of a model that it trained are not transposed.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megavlm.config.schema import ModelConfig
from megavlm.families import qwen3_vl
from megavlm.families.shared.experts import qwen_experts
from megavlm.families.shared.family import NamePrefixes
from megavlm.families.shared.qwen_vl import with_defaults
from megavlm.families.shared.settings import Settings

_TEXT: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "max_position_embeddings": 128000,
    "rms_norm_eps": 1e-6,
    "rope_theta": 5e5,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1408,
}


def config(settings: Settings) -> ModelConfig:
    """Qwen3VLMoeConfig. Weights of a token's experts add up to 1 in Transformers, whatever `norm_topk_prob` says."""
    text = with_defaults(settings.section("text_config"), _TEXT)
    model = qwen3_vl.whole_model(settings, text, kind="qwen3_moe")
    return replace(model, experts=qwen_experts(text, layers=model.language.num_layers, normalized=True))


def _published(**sizes: int) -> dict[str, Any]:
    shared = {"num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8}
    rope = {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20]}
    return {
        "text_config": {**shared, **sizes, "max_position_embeddings": 262144, "rope_parameters": rope},
        "vision_config": {"out_hidden_size": sizes["hidden_size"]},
    }


FAMILY = replace(
    qwen3_vl.FAMILY,
    name="qwen3_vl_moe",
    model_types=("qwen3_vl_moe",),
    config=config,
    published={
        "qwen3_vl_30b_a3b": _published(
            hidden_size=2048,
            intermediate_size=6144,
            num_hidden_layers=48,
            num_attention_heads=32,
            moe_intermediate_size=768,
        ),
        "qwen3_vl_235b_a22b": _published(
            hidden_size=4096,
            intermediate_size=12288,
            num_hidden_layers=94,
            num_attention_heads=64,
            moe_intermediate_size=1536,
        ),
    },
    name_prefixes=tuple(
        NamePrefixes(vision="model.visual.", language="model.language_model.", experts=experts)
        for experts in ("stacked", "transposed")
    ),
)
