"""LLaVA-1.5: CLIP without its last layer and class token, a two-layer MLP, and Vicuna, Mistral or another Llama."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megavlm.config.schema import ModelConfig, ProjectorConfig, VisionConfig
from megavlm.families.shared.chat import VICUNA
from megavlm.families.shared.family import NESTED_TOWERS, Composition, Family, NamePrefixes, llava_prefixes
from megavlm.families.shared.inputs import tokens_and_pixels
from megavlm.families.shared.language import experts, is_tied, language, language_table
from megavlm.families.shared.settings import Settings, refuse
from megavlm.families.shared.table import Table, linear
from megavlm.families.shared.vision import clip, clip_table, siglip, siglip_table
from megavlm.inputs.processor import Processor
from megavlm.inputs.reader import CLIP_PIXELS, SQUARE_224, Json, ProcessorReader, build_whole

# Family of a standalone vision tower → its model_type inside a LLaVA.
_TOWERS = {"clip": "clip_vision_model", "siglip": "siglip_vision_model"}
_TEXTS = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")


def config(settings: Settings) -> ModelConfig:
    """Return the `ModelConfig` of a LlavaConfig. CLIP's class token must be dropped (strategy "default")."""
    text = settings.section("text_config")
    layer = settings.get("vision_feature_layer", -2)
    if not isinstance(layer, int):
        refuse(settings, "vision_feature_layer", "features of several layers are not known here")
    settings.require("projector_hidden_act", "gelu", why="only GELU projectors are known here")
    return ModelConfig(
        vision=_vision(settings, layer),
        projector=ProjectorConfig(kind="mlp", bias=settings.get("multimodal_projector_bias", True)),
        language=language(text, tied=is_tied(settings, text)),
        experts=experts(text),
        image_token=settings.get("image_token_index", settings.get("image_token_id", 32000)),
    )


def _vision(settings: Settings, layer: int) -> VisionConfig:
    tower = settings.section("vision_config")
    kind = tower.get("model_type", "clip_vision_model")
    if layer >= 0:  # hidden_states[0] is the input of the first layer
        layer -= tower.get("num_hidden_layers", 12) + 1
    if kind == "siglip_vision_model":
        settings.require("vision_feature_select_strategy", "full", why="SigLIP has no class token to drop")
        return siglip(tower, feature_layer=layer, post_norm=False)
    if kind != "clip_vision_model":
        refuse(tower, "model_type", "known towers are clip_vision_model and siglip_vision_model")
    settings.require("vision_feature_select_strategy", "default", why="the class token as a feature is not known here")
    return clip(tower, feature_layer=layer)


def whole_table(
    tower: Table, model: ModelConfig, prefixes: NamePrefixes, mlp: tuple[str, str] = ("linear_1", "linear_2")
) -> Table:
    """Return the table of a model, given the table of its tower; `mlp` are file names of the projector's layers."""
    first, last = (prefixes.projector + name for name in mlp)
    return {
        **tower,
        **linear("projector.linear_fc1", first, bias=model.projector.bias),
        **linear("projector.linear_fc2", last, bias=model.projector.bias),
        **language_table(model, prefixes),
    }


def table(model: ModelConfig, prefixes: NamePrefixes) -> Table:
    tower = clip_table if model.vision.class_token else siglip_table
    return whole_table(tower(model.vision, prefixes.vision), model, prefixes)


def build_processor(options: Json, model: ModelConfig, shared: dict[str, Any]) -> Processor:
    """Return CLIP's image processor, which pads images to squares first if do_pad is set."""
    return replace(build_whole(options, model, shared), pad_to_square=bool(options.get("do_pad", False)))


def compose(parts: Composition) -> dict[str, Any] | None:
    """Return the config.json of a LLaVA that computes the same as a composed model; None if no LLaVA does."""
    model, projector = parts.model, parts.model.projector
    plain = projector.kind == "mlp" and projector.pixel_shuffle == 1 and not projector.input_norm
    plain = plain and projector.anyres_max_tiles is None and projector.hidden_size == model.language.hidden_size
    normed = model.vision.post_norm and model.vision.feature_layer == -1
    # A part may come from a larger model, where its settings are a section; a LLaVA omits the types of both parts.
    tower = parts.vision.values.get("vision_config", parts.vision.values)
    text = {"model_type": "llama", **parts.language.values.get("text_config", parts.language.values)}
    unnamed = "clip_vision_model" if parts.vision_family == "llava" else None
    kind = _TOWERS.get(parts.vision_family) or tower.get("model_type", unnamed)
    if kind not in _TOWERS.values() or text["model_type"] not in _TEXTS or normed or not plain:
        return None
    return {
        "architectures": ["LlavaForConditionalGeneration"],
        "model_type": "llava",
        "vision_config": {**tower, "model_type": kind},
        "text_config": text,
        "image_token_index": parts.image_token,
        "vision_feature_layer": model.vision.feature_layer,
        "vision_feature_select_strategy": "default" if model.vision.class_token else "full",
        "projector_hidden_act": "gelu",
        "multimodal_projector_bias": projector.bias,
        "tie_word_embeddings": model.language.tie_embeddings,
        "dtype": text.get("dtype", text.get("torch_dtype", "float32")),
    }


def processor(model: ModelConfig) -> dict[str, Any]:
    return {
        "processor_class": "LlavaProcessor",
        "patch_size": model.vision.patch_size,
        "vision_feature_select_strategy": "default" if model.vision.class_token else "full",
        "num_additional_image_tokens": int(model.vision.class_token),
    }


FAMILY = Family(
    name="llava",
    model_types=("llava",),
    config=config,
    table=table,
    inputs=tokens_and_pixels,
    name_prefixes=llava_prefixes(*NESTED_TOWERS),
    image_processors=(
        ProcessorReader(
            ("Llava",), {**CLIP_PIXELS, **SQUARE_224, "do_center_crop": True, "do_pad": False}, build_processor
        ),
    ),
    chat_template=VICUNA,
    compose=compose,
    processor=processor,
    unused=(r".*vision_tower\..*", r".*\.rotary_emb\.inv_freq"),
)
