"""Qwen2.5-VL: a ViT with windowed attention and 2-D rotary positions, 2×2 merger, and Qwen2.5 with M-RoPE.

The merger's norm is over single patches, before they are merged: here it is `vision.norm`, trained with the tower.
"""

from __future__ import annotations

from typing import Any

from megavlm.arch.layers import VISION_LAYER
from megavlm.config.schema import ModelConfig, VisionConfig
from megavlm.families.shared.chat import CHATML
from megavlm.families.shared.family import Family, NamePrefixes
from megavlm.families.shared.language import language_table
from megavlm.families.shared.qwen_video import VIDEOS, with_videos
from megavlm.families.shared.qwen_vl import (
    IMAGE,
    PROCESSOR,
    QWEN2_PREFIXES,
    attention_table,
    inputs,
    model_config,
    patch_embed_table,
    qwen2_merger_table,
    qwen2_text,
    qwen2_vision,
    with_defaults,
)
from megavlm.families.shared.settings import Settings
from megavlm.families.shared.table import Concat, Table, linear

_VISION: dict[str, Any] = {
    "depth": 32,
    "hidden_size": 3584,
    "intermediate_size": 3420,
    "num_heads": 16,
    "window_size": 112,
    "out_hidden_size": 3584,
    "fullatt_block_indexes": [7, 15, 23, 31],
}


def config(settings: Settings) -> ModelConfig:
    """Qwen2_5_VLConfig."""
    tower = with_defaults(settings.section("vision_config"), _VISION)
    model = model_config(settings, tower=tower, vision=_vision(tower), text=qwen2_text(settings))
    return with_videos(model, settings, steps_per_second=tower.get("tokens_per_second", 4))


def _vision(tower: Settings) -> VisionConfig:
    tower.require("hidden_act", "silu", why="only SwiGLU is known here")
    return qwen2_vision(
        tower,
        normalization="RMSNorm",
        activation="swiglu",
        window_size=tower.need("window_size"),
        full_attention_layers=tuple(tower.need("fullatt_block_indexes")),
    )


def table(model: ModelConfig, prefixes: NamePrefixes) -> Table:
    vision, visual = model.vision, prefixes.vision
    names = patch_embed_table(vision, visual)
    for number in range(vision.num_layers):
        layer, hf_layer = f"{VISION_LAYER}{number}.", f"{visual}blocks.{number}."
        names |= attention_table(vision, layer, hf_layer, norm_bias=False)
        for leaf in ("weight", "bias"):
            gate_and_up = (f"{hf_layer}mlp.gate_proj.{leaf}", f"{hf_layer}mlp.up_proj.{leaf}")
            names[f"{layer}mlp.linear_fc1.{leaf}"] = Concat(gate_and_up)
        names |= linear(f"{layer}mlp.linear_fc2", f"{hf_layer}mlp.down_proj", bias=True)
    return {
        **names,
        **qwen2_merger_table(visual, norm_bias=False),
        **language_table(model.language, prefixes.language, head=prefixes.head),
    }


PUBLISHED: dict[str, dict[str, Any]] = {
    "qwen2_5_vl_3b": {
        "hidden_size": 2048,
        "intermediate_size": 11008,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
        "vision_config": {"hidden_size": 1280, "out_hidden_size": 2048},
    },
    "qwen2_5_vl_7b": {
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vision_config": {"hidden_size": 1280},
    },
    "qwen2_5_vl_32b": {
        "hidden_size": 5120,
        "intermediate_size": 27648,
        "num_hidden_layers": 64,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "vision_config": {"hidden_size": 1280, "intermediate_size": 3456, "out_hidden_size": 5120},
    },
    "qwen2_5_vl_72b": {"vision_config": {"hidden_size": 1280, "intermediate_size": 3456, "out_hidden_size": 8192}},
}

FAMILY = Family(
    name="qwen2_5_vl",
    model_types=("qwen2_5_vl",),
    config=config,
    table=table,
    inputs=inputs,
    image_processors=(PROCESSOR,),
    videos=VIDEOS,
    image_text=IMAGE,
    chat_template=CHATML,
    published=PUBLISHED,
    name_prefixes=QWEN2_PREFIXES,
)
