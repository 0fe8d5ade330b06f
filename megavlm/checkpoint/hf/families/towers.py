"""Encoders and language models by themselves: what a VLM is composed of with --vision-from and --language-from."""

from __future__ import annotations

from collections.abc import Callable

from megavlm.checkpoint.hf.families.language import LANGUAGE_TYPES, language, language_table
from megavlm.checkpoint.hf.families.vision import clip, clip_table, intern, intern_table, siglip, siglip_table
from megavlm.checkpoint.hf.family import Family, Spelling
from megavlm.checkpoint.hf.settings import Settings
from megavlm.checkpoint.hf.table import Table
from megavlm.config.schema import ModelConfig, VisionConfig


def _tower(
    name: str,
    kinds: tuple[str, ...],
    read: Callable[[Settings], VisionConfig],
    names: Callable[[VisionConfig, str], Table],
    *,
    unused: tuple[str, ...],
) -> Family:
    def config(settings: Settings) -> ModelConfig:
        # A whole CLIP or SigLIP holds its tower's settings in a section, a tower alone at the top.
        return ModelConfig(
            vision=read(settings.section("vision_config") if "vision_config" in settings.values else settings)
        )

    def table(model: ModelConfig, spelling: Spelling) -> Table:
        return names(model.vision, spelling.vision)

    spellings = (Spelling(vision=""), Spelling(vision="vision_model."))
    return Family(name, kinds, config, table, spellings, parts=("vision",), unused=unused)


# Layers after the features', the pooled output's parts; a whole CLIP's or SigLIP's text side.
_BESIDE = (
    r"(vision_model\.)?(encoder\.layers|post_layernorm|head)\..*",
    r"(text_model|text_projection|visual_projection)\..*",
    r"logit_scale|logit_bias|.*position_ids",
)

# Features of the second to last layer, LLaVA's choice, are the default; --vision-feature-layer takes others.
CLIP = _tower(
    "clip",
    ("clip", "clip_vision_model"),
    lambda settings: clip(settings, feature_layer=-2),
    clip_table,
    unused=_BESIDE,
)
SIGLIP = _tower(
    "siglip",
    ("siglip", "siglip_vision_model"),
    lambda settings: siglip(settings, feature_layer=-2, post_norm=False),
    siglip_table,
    unused=_BESIDE,
)
INTERN_VIT = _tower(
    "internvl_vision",
    ("internvl_vision",),
    lambda settings: intern(settings, feature_layer=-1),
    intern_table,
    unused=(r"layernorm\..*", r"embeddings\.mask_token"),
)


def _text_config(settings: Settings) -> ModelConfig:
    return ModelConfig(language=language(settings))


def _text_table(model: ModelConfig, spelling: Spelling) -> Table:
    return language_table(model.language, spelling.language, head=spelling.head)


TEXT = Family(
    name="text",
    model_types=LANGUAGE_TYPES,
    config=_text_config,
    table=_text_table,
    spellings=(Spelling(language="model."),),
    parts=("language",),
    unused=(r".*\.rotary_emb\.inv_freq",),
)
