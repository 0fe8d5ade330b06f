"""Qwen2-VL: a ViT of LayerNorms and quick GELU with 2-D rotary positions, 2×2 merger, and Qwen2 with M-RoPE.

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
    UNGATED,
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
from megavlm.families.shared.table import Table, linear

_VISION: dict[str, Any] = {"depth": 32, "embed_dim": 1280, "hidden_size": 3584, "mlp_ratio": 4, "num_heads": 16}


def config(settings: Settings) -> ModelConfig:
    """Qwen2VLConfig."""
    tower = _renamed(with_defaults(settings.section("vision_config"), _VISION))
    model = model_config(settings, tower=tower, vision=_vision(tower), text=qwen2_text(settings))
    return with_videos(model, settings, steps_per_second=None)


def _renamed(tower: Settings) -> Settings:
    """Return the tower's section as Qwen2.5-VL writes it, where `hidden_size` is the tower's own width."""
    width = tower.need("embed_dim")
    names = {
        "hidden_size": width,
        "out_hidden_size": tower.need("hidden_size"),
        "intermediate_size": int(width * tower.need("mlp_ratio")),
        "in_channels": tower.get("in_channels", tower.get("in_chans", 3)),
    }
    return Settings({**tower.values, **names}, tower.where)


def _vision(tower: Settings) -> VisionConfig:
    return qwen2_vision(tower, activation=tower.choice("hidden_act", UNGATED, "quick_gelu"))


def table(model: ModelConfig, prefixes: NamePrefixes) -> Table:
    vision, visual = model.vision, prefixes.vision
    names = patch_embed_table(vision, visual)
    for number in range(vision.num_layers):
        layer, hf_layer = f"{VISION_LAYER}{number}.", f"{visual}blocks.{number}."
        names |= attention_table(vision, layer, hf_layer, norm_bias=True)
        names |= linear(f"{layer}mlp.linear_fc1", f"{hf_layer}mlp.fc1", bias=True)
        names |= linear(f"{layer}mlp.linear_fc2", f"{hf_layer}mlp.fc2", bias=True)
    return {
        **names,
        **qwen2_merger_table(visual, norm_bias=True),
        **language_table(model.language, prefixes.language, head=prefixes.head),
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
    published={
        "qwen2_vl_2b": {
            "hidden_size": 1536,
            "intermediate_size": 8960,
            "num_hidden_layers": 28,
            "num_attention_heads": 12,
            "num_key_value_heads": 2,
            "vocab_size": 151936,
            "tie_word_embeddings": True,
            "vision_config": {"hidden_size": 1536},
        },
        "qwen2_vl_7b": {
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
        },
        "qwen2_vl_72b": {"vision_config": {"hidden_size": 8192}},
    },
    name_prefixes=QWEN2_PREFIXES,
)
