"""GLM-OCR: GLM-4.1V's merger and language model after a vision tower with q/k norm and biases in all layers.

The tower has rotary embeddings and no learned positions.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megavlm.arch.layers import VISION_NORM
from megavlm.config.schema import ModelConfig, VisionConfig
from megavlm.families import glm4v
from megavlm.families.shared.family import NamePrefixes
from megavlm.families.shared.language import is_tied
from megavlm.families.shared.qwen_vl import attention_table, patch_embed_table, with_defaults
from megavlm.families.shared.settings import Settings
from megavlm.families.shared.table import Table, gated, linear
from megavlm.families.shared.vision import blocks

_TEXT: dict[str, Any] = {
    "vocab_size": 59392,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
}
_VISION: dict[str, Any] = {
    "depth": 24,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "out_hidden_size": 1536,
    "num_heads": 16,
    "rms_norm_eps": 1e-5,
}


def config(settings: Settings) -> ModelConfig:
    """Return the `ModelConfig` of a GlmOcrConfig."""
    text = with_defaults(settings.section("text_config"), _TEXT)
    tower = with_defaults(settings.section("vision_config"), _VISION)
    language = glm4v.language(text, kind="llama", tied=is_tied(settings, text))
    return ModelConfig(
        vision=_vision(tower),
        projector=glm4v.merger(tower, language, inner=tower.need("out_hidden_size") * tower.get("in_channels", 3)),
        language=language,
        image_token=settings.get("image_token_id", 59280),
    )


def _vision(tower: Settings) -> VisionConfig:
    """Return the vision tower of a GlmOcrVisionConfig."""
    tower.require("attention_bias", True, why="the tower is known with biases")
    return glm4v.vision(tower, position_embedding="rope2d", qk_norm="head")


def table(model: ModelConfig, prefixes: NamePrefixes) -> Table:
    vision, visual = model.vision, prefixes.vision
    names = patch_embed_table(vision, visual)
    for layer, hf_layer in blocks(vision, f"{visual}blocks."):
        names |= attention_table(vision, layer, hf_layer)
        names |= linear(f"{layer}self_attention.q_layernorm", f"{hf_layer}attn.q_norm", bias=False)
        names |= linear(f"{layer}self_attention.k_layernorm", f"{hf_layer}attn.k_norm", bias=False)
        names |= gated(f"{layer}mlp", f"{hf_layer}mlp", bias=True)
    names |= linear(VISION_NORM, f"{visual}post_layernorm", bias=False)
    return {**names, **glm4v.merger_table(model, prefixes), **glm4v.text_table(model, prefixes)}


FAMILY = replace(
    glm4v.FAMILY,
    name="glm_ocr",
    model_types=("glm_ocr",),
    config=config,
    table=table,
    unused=(r"model\.language_model\.layers\.16\..*",),  # a layer that predicts further tokens
)
