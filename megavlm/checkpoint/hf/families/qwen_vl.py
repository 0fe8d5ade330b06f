"""What Qwen2.5-VL and Qwen3-VL share: the tower's attention, M-RoPE, the merger, and the way images are given."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megavlm.checkpoint.hf.families.language import language
from megavlm.checkpoint.hf.settings import Settings, refuse
from megavlm.checkpoint.hf.table import FusedQKV, Same, Table, linear
from megavlm.config.schema import LanguageConfig, ModelConfig, ProjectorConfig, VisionConfig
from megavlm.data.batch import MicroBatch
from megavlm.model.merge import pixel_shuffle


def with_defaults(settings: Settings, defaults: Mapping[str, Any]) -> Settings:
    """A section with what its configuration class fills in where config.json is silent."""
    given = {name: value for name, value in settings.values.items() if value is not None}
    return Settings({**defaults, **given}, settings.where)


def text_model(
    settings: Settings, *, kind: str, tied: bool, section: tuple[int, ...], interleaved: bool
) -> LanguageConfig:
    """A language model of the family `kind`, whose pairs of channels turn with time, height or width.

    `section` is what the architecture takes where config.json gives no sections.
    """
    rope = {**settings.get("rope_scaling", {}), **settings.get("rope_parameters", {})}
    return replace(
        language(settings, kind=kind, tied=tied),
        mrope_section=tuple(rope.get("mrope_section", section)),
        mrope_interleaved=interleaved,
    )


def vision_sizes(tower: Settings) -> dict[str, Any]:
    """The sizes that both towers spell alike."""
    return {
        "num_layers": tower.need("depth"),
        "hidden_size": tower.need("hidden_size"),
        "ffn_hidden_size": tower.need("intermediate_size"),
        "num_attention_heads": tower.need("num_heads"),
        "patch_size": tower.square("patch_size", 14),
        "temporal_patch_size": tower.square("temporal_patch_size", 2),
        "in_channels": tower.get("in_channels", 3),
        "rotary_base": float(tower.section("rope_parameters").get("rope_theta", 10000.0)),
        "norm_epsilon": 1e-6,
    }


def merger(tower: Settings, text: LanguageConfig) -> ProjectorConfig:
    """N×N patches side by side, as wide inside as they are, then as wide as the text. Its norm is `vision.norm`."""
    if tower.need("out_hidden_size") != text.hidden_size:
        refuse(tower, "out_hidden_size", f"features must be as wide as the language model, {text.hidden_size}")
    side = tower.get("spatial_merge_size", 2)
    return ProjectorConfig(kind="mlp", hidden_size=tower.need("hidden_size") * side**2, pixel_shuffle=side)


def patch_embed_table(vision: VisionConfig, prefix: str) -> Table:
    """The convolution over time, height and width; ours is the same weight, flattened."""
    side = vision.patch_size
    view = (vision.hidden_size, vision.in_channels, vision.temporal_patch_size, side, side)
    return {
        f"patch_embed.proj.{leaf}": Same(f"{prefix}patch_embed.proj.{leaf}", view=view if leaf == "weight" else None)
        for leaf in (("weight", "bias") if vision.patch_bias else ("weight",))
    }


def attention_table(vision: VisionConfig, ours: str, theirs: str, *, norm_bias: bool) -> Table:
    """Norms and attention of one vision layer; the MLPs differ."""
    table: Table = {
        f"{ours}self_attention.linear_qkv.{leaf}": FusedQKV(
            f"{theirs}attn.qkv.{leaf}", heads=vision.num_attention_heads
        )
        for leaf in ("weight", "bias")
    }
    table |= linear(f"{ours}self_attention.linear_proj", f"{theirs}attn.proj", bias=True)
    table |= linear(f"{ours}input_layernorm", f"{theirs}norm1", bias=norm_bias)
    table |= linear(f"{ours}pre_mlp_layernorm", f"{theirs}norm2", bias=norm_bias)
    return table


def inputs(batch: MicroBatch, model: ModelConfig) -> dict[str, Tensor]:
    """Tokens, which of them are images, and patches: block by block, each pixel repeated over time."""
    assert batch.patches is not None
    given = {"input_ids": batch.tokens}
    if not batch.grids:
        return given
    side, channels, frames = model.projector.pixel_shuffle, model.vision.in_channels, model.vision.temporal_patch_size
    blocks = pixel_shuffle(batch.patches, batch.grids, side).view(-1, channels, 1, model.vision.patch_size**2)
    return given | {
        "pixel_values": blocks.expand(-1, -1, frames, -1).flatten(1),
        "image_grid_thw": torch.tensor([(1, *grid) for grid in batch.grids], device=batch.tokens.device),
        "mm_token_type_ids": batch.tokens.eq(model.image_token or 0).int(),
    }
