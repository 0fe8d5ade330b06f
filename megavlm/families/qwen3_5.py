"""Qwen3.5, 3.6 and 3.8: Qwen3-VL's tower without DeepStack, and a hybrid of linear and gated softmax attention.

Three of four layers are GatedDeltaNet. Norms multiply by 1 + weight, except for the norm inside linear attention. A
layer that predicts a further token (`mtp.*`, with softmax attention) is trained if `model.language.mtp_layers` is set,
and is exported unchanged otherwise.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megavlm.config.schema import LanguageConfig, ModelConfig
from megavlm.families import qwen3_vl
from megavlm.families.shared.experts import shared_qwen_experts
from megavlm.families.shared.family import NamePrefixes, Predictors
from megavlm.families.shared.language import partly_turning, predictor_table, types_of_layers
from megavlm.families.shared.qwen_vl import text_model as qwen_text_model
from megavlm.families.shared.qwen_vl import with_defaults, with_experts
from megavlm.families.shared.settings import Settings, refuse
from megavlm.families.shared.table import Table

_LINEAR: dict[str, Any] = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
# Defaults of the configuration classes beyond Qwen3's.
_TEXT: dict[str, Any] = {
    "vocab_size": 248320,
    "intermediate_size": 12288,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    **_LINEAR,
}
_MOE_TEXT: dict[str, Any] = {
    **_TEXT,
    "hidden_size": 2048,
    "intermediate_size": 512,  # not used by any layer
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}
_SECTION = (11, 11, 10)
_MARKS = {"image_token_id": 248056, "video_token_id": 248057}


def config(settings: Settings) -> ModelConfig:
    """Return the `ModelConfig` of a Qwen3_5Config."""
    return _model(settings, with_defaults(settings.section("text_config"), _TEXT))


def moe_config(settings: Settings) -> ModelConfig:
    """Return the `ModelConfig` of a Qwen3_5MoeConfig. The weights of a token's experts add up to 1."""
    text = with_defaults(settings.section("text_config"), _MOE_TEXT)
    return replace(_model(settings, text), experts=shared_qwen_experts(text))


def _model(settings: Settings, text: Settings) -> ModelConfig:
    tower = {**settings.section("vision_config").values, "deepstack_visual_indexes": []}
    whole = with_defaults(settings, _MARKS)
    whole = Settings({**whole.values, "vision_config": tower}, settings.where)
    model = qwen3_vl.whole_model(whole, text, kind="qwen3", section=_SECTION)
    return replace(model, language=hybrid(model.language, text))


def text_model(text: Settings, *, tied: bool) -> LanguageConfig:
    """Return the language model of a Qwen3_5TextConfig that is part of another architecture."""
    text = with_defaults(text, _TEXT)
    return hybrid(qwen_text_model(text, kind="qwen3", tied=tied, section=_SECTION, interleaved=True), text)


def hybrid(language: LanguageConfig, text: Settings) -> LanguageConfig:
    """Return a Qwen3 model with the changes of Qwen3.5.

    These are linear attention, an output gate, 1 + weight norms and partial rotary embeddings.
    """
    if not text.get("attn_output_gate", True):
        refuse(text, "attn_output_gate", "attention is known with a gate on its output")
    if text.need("linear_num_value_heads") % text.need("linear_num_key_heads"):
        refuse(text, "linear_num_value_heads", "each key head serves as many value heads")
    text.require("output_gate_type", "swish", "silu", why="linear attention is known with a SiLU gate")
    layers = language.num_layers
    interval = text.get("full_attention_interval", 4)
    usual = ["full_attention" if (number + 1) % interval == 0 else "linear_attention" for number in range(layers)]
    return replace(
        partly_turning(language, text, 0.25),
        attention_output_gate=True,
        apply_layernorm_1p=True,
        linear_attention_layers=types_of_layers(text, usual, "linear_attention", "full_attention"),
        **{name: text.need(name) for name in _LINEAR},
    )


def table(model: ModelConfig, prefixes: NamePrefixes) -> Table:
    names = qwen3_vl.table(model, prefixes)
    ends = ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm")
    experts = prefixes.further_experts or prefixes.experts
    for depth in range(model.language.mtp_layers):
        names |= predictor_table(model, depth, ends, hf_layer=f"mtp.layers.{depth}.", stored=experts)
    return names


FAMILY = replace(
    qwen3_vl.FAMILY,
    name="qwen3_5",
    model_types=("qwen3_5",),
    config=config,
    table=table,
    predictors=Predictors(r"mtp\..*"),
)

MOE = replace(
    FAMILY,
    name="qwen3_5_moe",
    model_types=("qwen3_5_moe",),
    config=moe_config,
    name_prefixes=(
        *with_experts("stacked", "apart"),
        *(replace(each, further_experts="apart") for each in with_experts("stacked")),
        *(replace(each, further_experts="stacked") for each in with_experts("apart")),
    ),
)
