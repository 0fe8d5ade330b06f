"""LLaVA-1.5: CLIP without its last layer and class token, a two-layer MLP, and Vicuna, Mistral or another Llama."""

from __future__ import annotations

from torch import Tensor

from megavlm.checkpoint.hf.families.inputs import pixel_values
from megavlm.checkpoint.hf.families.language import language, language_table
from megavlm.checkpoint.hf.families.vision import clip, clip_table, siglip, siglip_table
from megavlm.checkpoint.hf.family import Family, Spelling
from megavlm.checkpoint.hf.settings import Settings, refuse
from megavlm.checkpoint.hf.table import Table, linear
from megavlm.config.schema import ModelConfig, ProjectorConfig, VisionConfig
from megavlm.data.batch import MicroBatch


def config(settings: Settings) -> ModelConfig:
    """LlavaConfig. With strategy "default" the class token is dropped, which is all that we do."""
    text = settings.section("text_config")
    layer = settings.get("vision_feature_layer", -2)
    if not isinstance(layer, int):
        refuse(settings, "vision_feature_layer", "features of several layers are not known here")
    settings.require("projector_hidden_act", "gelu", why="only GELU projectors are known here")
    tied = settings.get("tie_word_embeddings", False) or text.get("tie_word_embeddings", False)
    return ModelConfig(
        vision=_vision(settings, layer),
        projector=ProjectorConfig(kind="mlp", bias=settings.get("multimodal_projector_bias", True)),
        language=language(text, tied=tied),
        image_token=settings.get("image_token_index", settings.get("image_token_id", 32000)),
    )


def _vision(settings: Settings, layer: int) -> VisionConfig:
    tower = settings.section("vision_config")
    kind = tower.get("model_type", "clip_vision_model")
    if kind == "siglip_vision_model":
        settings.require("vision_feature_select_strategy", "full", why="SigLIP has no class token to drop")
        return siglip(tower, feature_layer=layer, post_norm=False)
    if kind != "clip_vision_model":
        refuse(tower, "model_type", "known towers are clip_vision_model and siglip_vision_model")
    settings.require("vision_feature_select_strategy", "default", why="the class token as a feature is not known here")
    if layer >= 0:  # hidden_states[0] is the input of the first layer
        layer -= tower.get("num_hidden_layers", 12) + 1
    return clip(tower, feature_layer=layer)


def table(model: ModelConfig, spelling: Spelling) -> Table:
    tower = clip_table if model.vision.class_token else siglip_table
    bias = model.projector.bias
    return {
        **tower(model.vision, spelling.vision),
        **linear("projector.linear_fc1", f"{spelling.projector}linear_1", bias=bias),
        **linear("projector.linear_fc2", f"{spelling.projector}linear_2", bias=bias),
        **language_table(model.language, spelling.language, head=spelling.head),
    }


def inputs(batch: MicroBatch, model: ModelConfig) -> dict[str, Tensor]:
    return {"input_ids": batch.tokens, **pixel_values(batch, model.vision)}


LLAVA = Family(
    name="llava",
    model_types=("llava",),
    config=config,
    table=table,
    inputs=inputs,
    spellings=(
        Spelling("vision_tower.", "multi_modal_projector.", "language_model.model.", "language_model.lm_head.weight"),
        Spelling(
            "vision_tower.vision_model.",
            "multi_modal_projector.",
            "language_model.model.",
            "language_model.lm_head.weight",
        ),
        Spelling("model.vision_tower.", "model.multi_modal_projector.", "model.language_model."),
        Spelling("model.vision_tower.vision_model.", "model.multi_modal_projector.", "model.language_model."),
    ),
    unused=(r".*vision_tower\..*", r".*\.rotary_emb\.inv_freq"),
)
