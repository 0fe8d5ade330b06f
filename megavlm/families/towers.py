"""Families of standalone vision towers, for --vision-from: CLIP, SigLIP and InternViT."""

from __future__ import annotations

from collections.abc import Callable

from megavlm.config.schema import ModelConfig, VisionConfig
from megavlm.families.shared.family import Family, NamePrefixes
from megavlm.families.shared.settings import Settings
from megavlm.families.shared.table import Table
from megavlm.families.shared.vision import clip, clip_table, intern, intern_table, siglip, siglip_table
from megavlm.inputs.reader import CLIP_PIXELS, HALF_PIXELS, SQUARE_224, ProcessorReader, build_whole


def _tower(
    name: str,
    kinds: tuple[str, ...],
    read: Callable[[Settings], VisionConfig],
    names: Callable[[VisionConfig, str], Table],
    *,
    unused: tuple[str, ...],
    processors: tuple[ProcessorReader, ...] = (),
) -> Family:
    def config(settings: Settings) -> ModelConfig:
        # A whole CLIP or SigLIP has the tower's settings in a section, a standalone tower has them at the top level.
        return ModelConfig(
            vision=read(settings.section("vision_config") if "vision_config" in settings.values else settings)
        )

    def table(model: ModelConfig, prefixes: NamePrefixes) -> Table:
        return names(model.vision, prefixes.vision)

    name_prefixes = (NamePrefixes(vision=""), NamePrefixes(vision="vision_model."))
    return Family(
        name, kinds, config, table, name_prefixes, parts=("vision",), unused=unused, image_processors=processors
    )


# Layers after the feature layer, parts of the pooled output, and the text tower of a whole CLIP or SigLIP.
_BESIDE = (
    r"(vision_model\.)?(encoder\.layers|post_layernorm|head)\..*",
    r"(text_model|text_projection|visual_projection)\..*",
    r"logit_scale|logit_bias|.*position_ids",
)

# Features of the second to last layer (as in LLaVA) are the default; model.vision.feature_layer selects another.
CLIP = _tower(
    "clip",
    ("clip", "clip_vision_model"),
    lambda settings: clip(settings, feature_layer=-2),
    clip_table,
    unused=_BESIDE,
    processors=(ProcessorReader(("CLIP",), {**CLIP_PIXELS, **SQUARE_224, "do_center_crop": True}, build_whole),),
)
SIGLIP = _tower(
    "siglip",
    ("siglip", "siglip_vision_model"),
    lambda settings: siglip(settings, feature_layer=-2, post_norm=False),
    siglip_table,
    unused=_BESIDE,
    processors=(ProcessorReader(("Siglip",), {**HALF_PIXELS, "size": {"height": 224, "width": 224}}, build_whole),),
)
INTERN_VIT = _tower(
    "internvl_vision",
    ("internvl_vision",),
    lambda settings: intern(settings, feature_layer=-1),
    intern_table,
    unused=(r"layernorm\..*", r"embeddings\.mask_token"),
)
