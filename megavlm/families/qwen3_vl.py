"""Qwen3-VL: a ViT with learned and rotary positions, 2×2 mergers, DeepStack, and Qwen3 or Qwen3-MoE with interleaved
M-RoPE.

The merger's norm applies to single patches before they are merged: here it is `vision.norm`, trained with the tower.
DeepStack's mergers have their norm after merging: they are layers `deepstack.*` here, trained with the projector. Each
pair of a video's frames is a run of tokens after a text with its time.

Published files store the matrices of experts transposed. Transformers transposes such tensors when it loads them, and
saves them in its own layout, so files of a model that it trained are not transposed. Quantized files may have a tensor
for each matrix.
"""

from __future__ import annotations

from dataclasses import replace
from math import isqrt
from typing import Any

from megavlm.arch.layers import DEEPSTACK, PROJECTOR, VISION_NORM
from megavlm.config.schema import ModelConfig, VisionConfig
from megavlm.families.shared.chat import CHATML
from megavlm.families.shared.experts import qwen_experts
from megavlm.families.shared.family import Family, NamePrefixes
from megavlm.families.shared.inputs import Batch, Given
from megavlm.families.shared.language import language_table
from megavlm.families.shared.qwen_vl import (
    IMAGE,
    PREFIXES,
    PROCESSOR,
    UNGATED,
    attention_table,
    model_config,
    patch_embed_table,
    text_model,
    vision_sizes,
    with_defaults,
    with_experts,
)
from megavlm.families.shared.qwen_vl import inputs as qwen_inputs
from megavlm.families.shared.settings import Settings, refuse
from megavlm.families.shared.table import Rename, Table, linear
from megavlm.families.shared.videos import TimedPairs, qwen_fields
from megavlm.families.shared.vision import blocks, mlp
from megavlm.inputs.reader import HALF_PIXELS, Json, VideoReader
from megavlm.inputs.video import Budget, VideoProcessor

# Defaults of the configuration classes beyond those of Qwen3 and Qwen3-MoE.
_TEXT: dict[str, Any] = {"max_position_embeddings": 128000, "rope_theta": 5e5}
_MOE_TEXT: dict[str, Any] = {
    **_TEXT,
    "intermediate_size": 5632,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1408,
}
_VISION: dict[str, Any] = {
    "depth": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_heads": 16,
    "patch_size": 16,
    "out_hidden_size": 3584,
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": [8, 16, 24],
}


def config(settings: Settings) -> ModelConfig:
    """Return the `ModelConfig` of a Qwen3VLConfig."""
    return whole_model(settings, with_defaults(settings.section("text_config"), _TEXT), kind="qwen3")


def moe_config(settings: Settings) -> ModelConfig:
    """Return the `ModelConfig` of a Qwen3VLMoeConfig.

    As in Transformers, the weights of a token's experts add up to 1, whatever `norm_topk_prob` is.
    """
    text = with_defaults(settings.section("text_config"), _MOE_TEXT)
    model = whole_model(settings, text, kind="qwen3_moe")
    return replace(model, experts=qwen_experts(text, layers=model.language.num_layers, normalized=True))


def whole_model(
    settings: Settings, text: Settings, *, kind: str, section: tuple[int, ...] = (24, 20, 20)
) -> ModelConfig:
    """Return the `ModelConfig` of a config.json; its language model is of type `kind` with the settings `text`."""
    tower = with_defaults(settings.section("vision_config"), _VISION)
    tied = settings.get("tie_word_embeddings", False)
    model = text_model(text, kind=kind, tied=tied, section=section, interleaved=True)
    return model_config(settings, tower=tower, vision=_vision(tower), text=model)


def _vision(tower: Settings) -> VisionConfig:
    positions = tower.need("num_position_embeddings")
    if isqrt(positions) ** 2 != positions:
        refuse(tower, "num_position_embeddings", "the table of positions must be square")
    sizes = vision_sizes(tower)
    activation: Any = tower.choice("hidden_act", UNGATED, "gelu_pytorch_tanh")
    return VisionConfig(
        **sizes,
        image_size=isqrt(positions) * sizes["patch_size"],
        position_embedding="learned_rope2d",
        position_interpolation="bilinear",
        activation=activation,
        deepstack_layers=tuple(tower.need("deepstack_visual_indexes")),
    )


def inputs(batch: Batch, model: ModelConfig) -> Given:
    """Return the inputs of the other Qwen-VL models without position_ids, which Qwen3-VL derives from the tokens."""
    return {name: value for name, value in qwen_inputs(batch, model).items() if name != "position_ids"}


def table(
    model: ModelConfig,
    prefixes: NamePrefixes,
    *,
    mergers: str = "deepstack_merger_list",
    parts: tuple[str, str, str] = ("norm", "linear_fc1", "linear_fc2"),
) -> Table:
    """Return the table; `mergers` are those of DeepStack, and `parts` the names of norm and layers in each merger."""
    norm, inner, outer = parts
    vision, visual = model.vision, prefixes.vision
    names = patch_embed_table(vision, visual)
    names["patch_embed.position"] = Rename(f"{visual}pos_embed.weight")
    for layer, hf_layer in blocks(vision, f"{visual}blocks."):
        names |= attention_table(vision, layer, hf_layer)
        names |= mlp(layer, hf_layer, ("linear_fc1", "linear_fc2"))
    merging = {PROJECTOR: f"{visual}merger."}
    for number in range(len(vision.deepstack_layers)):
        merging[f"{DEEPSTACK}{number}"] = hf_layer = f"{visual}{mergers}.{number}."
        names |= linear(f"{DEEPSTACK}{number}.norm", f"{hf_layer}{norm}", bias=True)
    for layer, hf_layer in merging.items():
        names |= linear(f"{layer}.linear_fc1", f"{hf_layer}{inner}", bias=True)
        names |= linear(f"{layer}.linear_fc2", f"{hf_layer}{outer}", bias=True)
    names |= linear(VISION_NORM, f"{visual}merger.{norm}", bias=True)
    return names | language_table(model, prefixes)


def build_video(options: Json, model: ModelConfig, shared: dict[str, Any]) -> VideoProcessor | None:
    if model.video_token is None:
        return None
    return TimedPairs(**shared, **qwen_fields(options, model), number=model.video_token)


FAMILY = Family(
    name="qwen3_vl",
    model_types=("qwen3_vl",),
    config=config,
    table=table,
    inputs=inputs,
    image_processors=(PROCESSOR,),
    videos=VideoReader(
        ("Qwen3VL",),
        ("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "cosmos3_omni"),
        {**HALF_PIXELS, "size": {"shortest_edge": 128 * 32**2, "longest_edge": 768 * 32**2}},
        Budget(),
        build_video,
    ),
    image_text=IMAGE,
    chat_template=CHATML,
    name_prefixes=PREFIXES,
)

MOE = replace(
    FAMILY,
    name="qwen3_vl_moe",
    model_types=("qwen3_vl_moe",),
    config=moe_config,
    name_prefixes=with_experts("stacked", "transposed", "apart"),
)
