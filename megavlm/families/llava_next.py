"""LLaVA-NeXT (LLaVA-1.6): LLaVA-1.5 with tiled images. Every image is tiled, and its features are not downsized."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from megavlm.arch.image_tokens import Tiling
from megavlm.config.schema import ModelConfig
from megavlm.errors import UserError
from megavlm.families import llava, llava_onevision
from megavlm.families.shared.chat import VICUNA
from megavlm.families.shared.family import Family
from megavlm.families.shared.inputs import Batch, Given, pixel_values
from megavlm.families.shared.settings import Settings
from megavlm.inputs.layout import Layout
from megavlm.inputs.processor import Processor
from megavlm.inputs.reader import CLIP_PIXELS, SQUARE_224, Json, ProcessorReader, has_only, sides
from megavlm.inputs.resize import Pixels

# (height, width) if a folder has no resolutions.
RESOLUTIONS = ((336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008))
_NEVER = 2**16  # tiles: more than any image has, so that features are not downsized


def config(settings: Settings) -> ModelConfig:
    """Return the `ModelConfig` of a LlavaNextConfig."""
    model = llava.config(settings)
    return replace(model, projector=replace(model.projector, anyres_max_tiles=_NEVER))


def tiling(settings: Settings) -> Tiling:
    return llava_onevision.tiling(Settings({"image_grid_pinpoints": RESOLUTIONS, **settings.values}, settings.where))


def inputs(batch: Batch, model: ModelConfig) -> Given:
    import torch

    tiled = {"image_sizes": torch.tensor([group.size for group in batch.image_sizes.tile_groups])}
    pixels = pixel_values(batch, model.vision)
    return {"input_ids": batch.text.tokens, **(tiled if pixels else {}), **pixels}


@dataclass(frozen=True, kw_only=True)
class EachTiled(llava_onevision.Anyres):
    """Tiles every image, also in samples with several images."""

    def layout(self, height: int, width: int, *, images: int = 1) -> Layout:
        return super().layout(height, width)

    def views(self, pixels: Pixels, *, images: int = 1) -> list[Pixels]:
        return super().views(pixels)


def build_processor(options: Json, model: ModelConfig, shared: dict[str, Any]) -> Processor:
    """Return the image processor. Raises UserError unless the crop size is the size of the square tiles."""
    size = options["size"]
    tile = (size["shortest_edge"],) * 2 if has_only(size, "shortest_edge") else sides(size, "size")
    if sides(options["crop_size"], "crop_size") != tile:
        raise UserError("crop_size in preprocessor_config.json must be its size: other tiles are not supported")
    anyres: Any = llava_onevision.build_processor({**options, "size": list(tile)}, model, shared)
    return EachTiled(**shared, tile=anyres.tile, resolutions=anyres.resolutions)


FAMILY = Family(
    name="llava_next",
    model_types=("llava_next",),
    config=config,
    table=llava_onevision.table,
    inputs=inputs,
    tiling=tiling,
    name_prefixes=llava.FAMILY.name_prefixes,
    image_processors=(
        ProcessorReader(
            ("LlavaNext",), {**CLIP_PIXELS, **SQUARE_224, "image_grid_pinpoints": RESOLUTIONS}, build_processor
        ),
    ),
    chat_template=VICUNA,
    unused=llava.FAMILY.unused,
)
