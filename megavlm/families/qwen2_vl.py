"""Qwen2-VL and Qwen2.5-VL: a ViT with 2-D rotary embeddings, 2×2 merger, and Qwen2 or Qwen2.5 with M-RoPE.

Qwen2.5-VL's tower has window attention, RMSNorm and SwiGLU. The merger's norm applies to single patches before they
are merged: here it is `vision.norm`, trained with the tower.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megavlm.arch.layers import VISION_NORM
from megavlm.config.schema import LanguageConfig, ModelConfig, VisionConfig
from megavlm.families.shared.chat import CHATML
from megavlm.families.shared.family import Family, NamePrefixes
from megavlm.families.shared.language import is_tied, language_table
from megavlm.families.shared.qwen_vl import (
    IMAGE,
    PREFIXES,
    PROCESSOR,
    UNGATED,
    attention_table,
    inputs,
    model_config,
    patch_embed_table,
    text_model,
    vision_sizes,
    with_defaults,
)
from megavlm.families.shared.settings import Settings
from megavlm.families.shared.table import Table, gated, linear
from megavlm.families.shared.videos import VIDEOS
from megavlm.families.shared.vision import blocks, mlp

_TEXT: dict[str, Any] = {
    "vocab_size": 152064,
    "hidden_size": 8192,
    "intermediate_size": 29568,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
}
_VISION: dict[str, Any] = {"depth": 32, "embed_dim": 1280, "hidden_size": 3584, "mlp_ratio": 4, "num_heads": 16}
WINDOWED_VISION: dict[str, Any] = {
    "depth": 32,
    "hidden_size": 3584,
    "intermediate_size": 3420,
    "num_heads": 16,
    "window_size": 112,
    "out_hidden_size": 3584,
    "fullatt_block_indexes": [7, 15, 23, 31],
}


def config(settings: Settings) -> ModelConfig:
    """Return the `ModelConfig` of a Qwen2VLConfig."""
    tower = _renamed(with_defaults(settings.section("vision_config"), _VISION))
    return model_config(settings, tower=tower, vision=_vision(tower), text=_language(settings))


def windowed_config(settings: Settings) -> ModelConfig:
    """Return the `ModelConfig` of a Qwen2_5_VLConfig."""
    tower = with_defaults(settings.section("vision_config"), WINDOWED_VISION)
    steps, text = tower.get("tokens_per_second", 4), _language(settings)
    return model_config(settings, tower=tower, vision=windowed(tower), text=text, steps_per_second=steps)


def _renamed(tower: Settings) -> Settings:
    """Return the tower's section with Qwen2.5-VL's names, where `hidden_size` is the tower's own width."""
    width = tower.need("embed_dim")
    names = {
        "hidden_size": width,
        "out_hidden_size": tower.need("hidden_size"),
        "intermediate_size": int(width * tower.need("mlp_ratio")),
        "in_channels": tower.get("in_channels", tower.get("in_chans", 3)),
    }
    return Settings({**tower.values, **names}, tower.where)


def _language(settings: Settings) -> LanguageConfig:
    """Return the language model of Qwen2-VL or Qwen2.5-VL. Published checkpoints have its settings at the top level."""
    nested = "text_config" in settings.values
    text = with_defaults(settings.section("text_config") if nested else settings, _TEXT)
    return text_model(text, kind="qwen2", tied=is_tied(settings, text), section=(16, 24, 24), interleaved=False)


def _tower(tower: Settings, **options: Any) -> VisionConfig:
    """Return the vision tower of Qwen2-VL or Qwen2.5-VL; the two differ in `options`."""
    sizes = vision_sizes(tower)
    return VisionConfig(
        **sizes,
        image_size=32 * sizes["patch_size"],  # any size will do: there is no table of positions
        position_embedding="rope2d",
        patch_bias=False,
        **options,
    )


def _vision(tower: Settings) -> VisionConfig:
    return _tower(tower, activation=tower.choice("hidden_act", UNGATED, "quick_gelu"))


def windowed(tower: Settings) -> VisionConfig:
    """Return the vision tower of a Qwen2_5_VLConfig, with window attention."""
    tower.require("hidden_act", "silu", why="only SwiGLU is known here")
    return _tower(
        tower,
        normalization="RMSNorm",
        activation="swiglu",
        window_size=tower.need("window_size"),
        full_attention_layers=tuple(tower.need("fullatt_block_indexes")),
    )


def table(model: ModelConfig, prefixes: NamePrefixes) -> Table:
    vision, visual = model.vision, prefixes.vision
    names, norm_bias = patch_embed_table(vision, visual), vision.normalization == "LayerNorm"
    for layer, hf_layer in blocks(vision, f"{visual}blocks."):
        names |= attention_table(vision, layer, hf_layer)
        if vision.activation != "swiglu":
            names |= mlp(layer, hf_layer)
        else:
            names |= gated(f"{layer}mlp", f"{hf_layer}mlp", bias=True)
    return {
        **names,
        **linear(VISION_NORM, f"{visual}merger.ln_q", bias=norm_bias),
        **linear("projector.linear_fc1", f"{visual}merger.mlp.0", bias=True),
        **linear("projector.linear_fc2", f"{visual}merger.mlp.2", bias=True),
        **language_table(model, prefixes),
    }


FAMILY = Family(
    name="qwen2_vl",
    model_types=("qwen2_vl",),
    config=config,
    table=table,
    inputs=inputs,
    image_processors=(PROCESSOR,),
    videos=VIDEOS,
    image_text=IMAGE,
    chat_template=CHATML,
    name_prefixes=PREFIXES[::-1],
)

WINDOWED = replace(FAMILY, name="qwen2_5_vl", model_types=("qwen2_5_vl",), config=windowed_config)
