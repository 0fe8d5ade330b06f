"""GLM-4.5V and GLM-4.6V: GLM-4.1V's tower and merger, and GLM-4.5 with M-RoPE, a mixture of experts.

Half of each head rotates, in halves as Llama's do. Experts are scored by sigmoids; a bias, which no gradient trains,
decides with the scores which experts a token takes. One expert is every token's. The first layers are dense.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megavlm.config.schema import LanguageConfig, ModelConfig
from megavlm.families import glm4v
from megavlm.families.shared.experts import glm_experts
from megavlm.families.shared.qwen_vl import text_model, with_defaults
from megavlm.families.shared.settings import Settings

_TEXT: dict[str, Any] = {
    "vocab_size": 151424,
    "hidden_size": 4096,
    "intermediate_size": 10944,
    "num_hidden_layers": 46,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "max_position_embeddings": 65536,
    "rms_norm_eps": 1e-5,
}


def config(settings: Settings) -> ModelConfig:
    """Glm4vMoeConfig."""
    text = with_defaults(settings.section("text_config"), _TEXT)
    language = _language(text, tied=glm4v.is_tied(settings, text))
    model = glm4v.whole_model(settings, language, image_token=151363)
    return replace(model, experts=glm_experts(text, layers=language.num_layers))


def _language(text: Settings, *, tied: bool) -> LanguageConfig:
    """Glm4vMoeTextConfig. `attention_bias` is of queries, keys and values, and not of the output."""
    unbiased = Settings({name: value for name, value in text.values.items() if name != "attention_bias"}, text.where)
    rope = {**text.get("rope_scaling", {}), **text.get("rope_parameters", {})}
    return replace(
        text_model(unbiased, kind="llama", tied=tied, section=(8, 12, 12), interleaved=False),
        add_qkv_bias=text.get("attention_bias", True),
        rotary_percent=rope.get("partial_rotary_factor", text.get("partial_rotary_factor", 0.5)),
    )


FAMILY = replace(
    glm4v.FAMILY,
    name="glm4v_moe",
    model_types=("glm4v_moe",),
    config=config,
    table=glm4v.whole_table,
    published={
        "glm_4_5v": {
            "text_config": {"vocab_size": 151552, "head_dim": 128},
            "vision_config": {"intermediate_size": 10944},
        }
    },
    not_in_peft=("gate_proj", "up_proj", "down_proj"),
    unused=(r"model\.(language_model\.)?layers\.(46|92)\..*",),  # layers that predict further tokens
)
