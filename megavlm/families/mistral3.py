"""Mistral 3 (Mistral Small 3.1 and 3.2, Ministral 3): Pixtral's tower, a learned merger of 2×2 patches, and Mistral."""

from __future__ import annotations

from megavlm.config.schema import LanguageConfig, ModelConfig, ProjectorConfig
from megavlm.families import llava, pixtral
from megavlm.families.pixtral import IMAGE, PROCESSOR, inputs, vision, vision_table
from megavlm.families.shared.chat import template
from megavlm.families.shared.family import Family, NamePrefixes
from megavlm.families.shared.language import language
from megavlm.families.shared.settings import Settings
from megavlm.families.shared.table import Rename, Table


def config(settings: Settings) -> ModelConfig:
    """Return the `ModelConfig` of a Mistral3Config."""
    text, tower = settings.section("text_config"), settings.section("vision_config")
    tower.require("model_type", "pixtral", why="only Pixtral's tower is known here")
    settings.require("vision_feature_layer", -1, why="only features of the last layer are known here")
    settings.require("projector_hidden_act", "gelu", why="only GELU projectors are known here")
    language_model = language(
        text,
        kind=text.get("model_type", "mistral"),
        # Transformers 5 writes the setting at the top level; older files have it in the text section, or omit false.
        tied=settings.get("tie_word_embeddings", text.get("tie_word_embeddings", False)),
    )
    return ModelConfig(
        vision=vision(tower),
        projector=merger(settings, language_model, bias=settings.get("multimodal_projector_bias", False)),
        language=language_model,
        image_token=settings.get("image_token_index", settings.get("image_token_id", 10)),
    )


def merger(settings: Settings, language: LanguageConfig, *, bias: bool) -> ProjectorConfig:
    """Return the projector: an RMSNorm of patches with the text's epsilon, a merging convolution and an MLP."""
    return ProjectorConfig(
        kind="mlp",
        pixel_shuffle=settings.get("spatial_merge_size", 2),
        merge="convolution",
        input_norm=True,
        norm_before_merge=True,
        normalization="RMSNorm",
        norm_epsilon=language.norm_epsilon,
        bias=bias,
    )


def table(model: ModelConfig, prefixes: NamePrefixes) -> Table:
    projector = prefixes.projector
    return {
        **llava.whole_table(vision_table(model.vision, prefixes.vision), model, prefixes),
        "projector.norm.weight": Rename(f"{projector}norm.weight"),
        "projector.convolution.weight": Rename(f"{projector}patch_merger.merging_layer.weight"),
    }


FAMILY = Family(
    name="mistral3",
    model_types=("mistral3",),
    config=config,
    table=table,
    inputs=inputs,
    name_prefixes=pixtral.FAMILY.name_prefixes,
    unused=pixtral.FAMILY.unused,
    image_processors=(PROCESSOR,),
    image_text=IMAGE,
    chat_template=template("mistral_v7", "[SYSTEM_PROMPT] [/SYSTEM_PROMPT] [INST] [/INST]"),
)
