"""LLaVA-OneVision: SigLIP without its last norm, a two-layer MLP, tiled images with newlines, Qwen2. No videos."""

from __future__ import annotations

import re

import torch
from torch import Tensor

from megavlm.checkpoint.hf.families.inputs import pixel_values
from megavlm.checkpoint.hf.families.language import language, language_table
from megavlm.checkpoint.hf.families.vision import siglip, siglip_table
from megavlm.checkpoint.hf.family import Family, Spelling
from megavlm.checkpoint.hf.settings import Settings, refuse
from megavlm.checkpoint.hf.table import Same, Table, linear
from megavlm.config.schema import ModelConfig, ProjectorConfig
from megavlm.data.anyres import Tiling, features_of_images
from megavlm.data.batch import MicroBatch
from megavlm.data.processors.build import DEFAULT_RESOLUTIONS
from megavlm.data.processors.sizes import best_resolution


def config(settings: Settings) -> ModelConfig:
    """LlavaOnevisionConfig. Its image_grid_pinpoints are for processors: a batch says how its images are tiled."""
    text, tower = settings.section("text_config"), settings.section("vision_config")
    tower.require("model_type", "siglip_vision_model", why="only SigLIP towers are known here")
    settings.require("projector_hidden_act", "gelu", why="only GELU projectors are known here")
    settings.require("vision_feature_select_strategy", "full", why="SigLIP has no class token to drop")
    layer = settings.get("vision_feature_layer", -1)
    if not isinstance(layer, int):
        refuse(settings, "vision_feature_layer", "features of several layers are not known here")
    if layer >= 0:  # hidden_states[0] is the input of the first layer
        layer -= tower.get("num_hidden_layers", 12) + 1
    tied = settings.get("tie_word_embeddings", False) or text.get("tie_word_embeddings", False)
    return ModelConfig(
        vision=siglip(tower, feature_layer=layer, post_norm=False),
        projector=ProjectorConfig(
            kind="mlp",
            bias=settings.get("multimodal_projector_bias", True),
            anyres_max_tiles=_max_tiles(settings),
        ),
        language=language(text, kind=text.get("model_type", "qwen2"), tied=tied),
        image_token=settings.get("image_token_index", settings.get("image_token_id", 151646)),
    )


def _max_tiles(settings: Settings) -> int:
    found = re.fullmatch(r"anyres_max_([1-9]\d*)", settings.get("vision_aspect_ratio", "anyres_max_9"))
    if found is None:
        refuse(settings, "vision_aspect_ratio", "only anyres_max_N is known here")
    return int(found[1])


def tiling(settings: Settings) -> Tiling:
    """Return how the model divides an image into tiles: Transformers' looks itself for the resolution that fits best,
    among `image_grid_pinpoints`.
    """
    side = settings.section("vision_config").get("image_size", DEFAULT_RESOLUTIONS[0][0])
    resolutions = [(height, width) for height, width in settings.get("image_grid_pinpoints", DEFAULT_RESOLUTIONS)]

    def of(size: tuple[int, int]) -> tuple[int, int]:
        height, width = best_resolution(size, resolutions)
        return height // side, width // side

    return of


def table(model: ModelConfig, spelling: Spelling) -> Table:
    projector, bias = f"{spelling.projector}multi_modal_projector.", model.projector.bias
    return {
        **siglip_table(model.vision, spelling.vision),
        "projector.image_newline": Same(f"{spelling.projector}image_newline"),
        **linear("projector.linear_fc1", f"{projector}linear_1", bias=bias),
        **linear("projector.linear_fc2", f"{projector}linear_2", bias=bias),
        **language_table(model.language, spelling.language, head=spelling.head),
    }


def inputs(batch: MicroBatch, model: ModelConfig) -> dict[str, Tensor]:
    """Transformers tiles an image if it is its sample's only one, so it must know how many each sample has."""
    if not batch.grids:
        return {"input_ids": batch.tokens}
    shuffle, most = model.projector.pixel_shuffle, model.projector.anyres_max_tiles
    features = features_of_images(batch.grids, batch.tile_groups, pixel_shuffle=shuffle, max_tiles=most)
    ends = torch.tensor(features).cumsum(0)
    image_tokens = torch.eq(batch.tokens, model.image_token or 0).sum(1).cumsum(0).cpu()
    images = torch.searchsorted(ends, image_tokens, right=True).diff(prepend=torch.tensor([0]))
    return {
        "input_ids": batch.tokens,
        "image_sizes": torch.tensor([group.size for group in batch.tile_groups]),
        "batch_num_images": images,
        **pixel_values(batch, model.vision),
    }


_LEGACY_HEAD = "language_model.lm_head.weight"

LLAVA_ONEVISION = Family(
    name="llava_onevision",
    model_types=("llava_onevision",),
    config=config,
    table=table,
    inputs=inputs,
    tiling=tiling,
    spellings=(
        Spelling("vision_tower.", "", "language_model.model.", _LEGACY_HEAD),
        Spelling("vision_tower.vision_model.", "", "language_model.model.", _LEGACY_HEAD),
        Spelling("model.vision_tower.", "model.", "model.language_model."),
        Spelling("model.vision_tower.vision_model.", "model.", "model.language_model."),
    ),
    # Layers after the features', and what makes SigLIP's pooled output.
    unused=(
        r".*vision_tower\.(vision_model\.)?(encoder\.layers|post_layernorm|head)\..*",
        r".*\.position_ids|.*\.rotary_emb\.inv_freq",
    ),
)
