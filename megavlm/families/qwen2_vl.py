"""Qwen2-VL: a ViT of LayerNorms and quick GELU with 2-D rotary positions, 2×2 merger, and Qwen2 with M-RoPE.

The merger's norm is over single patches, before they are merged: here it is `vision.norm`, trained with the tower.
"""

from __future__ import annotations

from typing import Any

from megavlm.arch.layers import VISION_LAYER, VISION_NORM
from megavlm.config.schema import ModelConfig, VisionConfig
from megavlm.families.shared.chat import CHATML
from megavlm.families.shared.family import Family, NamePrefixes
from megavlm.families.shared.language import language_table
from megavlm.families.shared.qwen_vl import (
    IMAGE,
    PROCESSOR,
    attention_table,
    inputs,
    merger,
    patch_embed_table,
    text_model,
    vision_sizes,
    with_defaults,
)
from megavlm.families.shared.settings import Settings
from megavlm.families.shared.table import Table, linear
from megavlm.families.shared.vision import ACTIVATIONS

_TEXT: dict[str, Any] = {
    "vocab_size": 152064,
    "hidden_size": 8192,
    "intermediate_size": 29568,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
}
_VISION: dict[str, Any] = {"depth": 32, "embed_dim": 1280, "hidden_size": 3584, "mlp_ratio": 4, "num_heads": 16}
# What their tower's section calls the width of features is elsewhere `out_hidden_size`, and its own width `embed_dim`.
_UNGATED = {hf_name: name for hf_name, name in ACTIVATIONS.items() if name != "swiglu"}


def config(settings: Settings) -> ModelConfig:
    """Qwen2VLConfig. Published checkpoints keep the language model's settings at the top."""
    nested = "text_config" in settings.values
    text = with_defaults(settings.section("text_config") if nested else settings, _TEXT)
    tower = _renamed(with_defaults(settings.section("vision_config"), _VISION))
    tied = settings.get("tie_word_embeddings", False) or text.get("tie_word_embeddings", False)
    model = text_model(text, kind="qwen2", tied=tied, section=(16, 24, 24), interleaved=False)
    return ModelConfig(
        vision=_vision(tower),
        projector=merger(tower, model),
        language=model,
        image_token=settings.get("image_token_id", 151655),
    )


def _renamed(tower: Settings) -> Settings:
    """The section with the names that Qwen2.5-VL and Qwen3-VL have for the same."""
    width = tower.need("embed_dim")
    names = {
        "hidden_size": width,
        "out_hidden_size": tower.need("hidden_size"),
        "intermediate_size": int(width * tower.need("mlp_ratio")),
        "in_channels": tower.get("in_channels", tower.get("in_chans", 3)),
    }
    return Settings({**tower.values, **names}, tower.where)


def _vision(tower: Settings) -> VisionConfig:
    sizes = vision_sizes(tower)
    activation: Any = tower.choice("hidden_act", _UNGATED, "quick_gelu")
    return VisionConfig(
        **sizes,
        image_size=32 * sizes["patch_size"],  # any size will do: there is no table of positions
        position_embedding="rope2d",
        activation=activation,
        patch_bias=False,
    )


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
        **linear(VISION_NORM, f"{visual}merger.ln_q", bias=True),
        **linear("projector.linear_fc1", f"{visual}merger.mlp.0", bias=True),
        **linear("projector.linear_fc2", f"{visual}merger.mlp.2", bias=True),
        **language_table(model.language, prefixes.language, head=prefixes.head),
    }


FAMILY = Family(
    name="qwen2_vl",
    model_types=("qwen2_vl",),
    config=config,
    table=table,
    inputs=inputs,
    image_processors=(PROCESSOR,),
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
    name_prefixes=(
        NamePrefixes(vision="visual.", language="model."),
        NamePrefixes(vision="model.visual.", language="model.language_model."),
    ),
)
