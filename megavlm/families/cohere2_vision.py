"""Command A Vision (Cohere 2 Vision): Aya Vision, with features after the tower's last norm and no projector norm."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from megavlm.config.schema import ModelConfig
from megavlm.families import aya_vision, internvl
from megavlm.families.aya_vision import END, PATCH, START
from megavlm.families.shared.qwen_vl import with_defaults
from megavlm.families.shared.settings import Settings
from megavlm.inputs.layout import Layout, Prompt
from megavlm.inputs.processor import Processor
from megavlm.inputs.reader import CLIP_PIXELS, Json, ProcessorReader, sides
from megavlm.inputs.resize import Size

BREAK = "<|IMG_LINE_BREAK|>"
_VISION: dict[str, Any] = {
    **{"hidden_size": 1152, "intermediate_size": 3072, "num_hidden_layers": 27, "num_attention_heads": 12},
    "image_size": 512,
}


def config(settings: Settings) -> ModelConfig:
    """Return the `ModelConfig` of a Cohere2VisionConfig."""
    tower = with_defaults(settings.section("vision_config"), _VISION)
    settings = with_defaults(settings, {"alignment_intermediate_size": 36864})
    return aya_vision.model_config(settings, tower, feature_layer=-1, post_norm=True)


@dataclass(frozen=True, kw_only=True)
class LeastScaled(internvl.DynamicTiles):
    """Cuts an image by the tile grid that enlarges it least, else reduces it least; a marker follows each tile."""

    def layout(self, height: int, width: int, *, images: int = 1) -> Layout:
        found = super().layout(height, width, images=images)
        count = len(found.tiles)
        texts = (START, *(BREAK,) * (count - 1), BREAK + END)
        return replace(found, prompt=Prompt(self.image_token, texts, (found.features // count,) * count))

    def _arrangement(self, size: Size) -> Size:
        return least_scaled(size, self.tile[0], most=self.most)


def least_scaled(size: Size, tile: int, *, most: int) -> Size:
    """Return the (rows, columns) of at most `most` tiles that enlarge an image least, else reduce it least.

    Of equal grids the one with fewest tiles is returned, then the one with fewest columns.
    """
    height, width = size
    grids = [(rows, columns) for columns in range(1, most + 1) for rows in range(1, most // columns + 1)]
    grids.sort(key=lambda grid: grid[0] * grid[1])
    scales = {grid: min(grid[1] * tile / width, grid[0] * tile / height) for grid in grids}
    enlarging = [grid for grid in grids if scales[grid] >= 1]
    return min(enlarging, key=scales.__getitem__) if enlarging else max(grids, key=scales.__getitem__)


def build_processor(options: Json, model: ModelConfig, shared: dict[str, Any]) -> Processor:
    return LeastScaled(
        tile=sides(options["size"], "size"),
        fewest=1,
        most=options["max_patches"] if options["crop_to_patches"] else 1,
        placeholder=PATCH,
        image_token=PATCH,
        **shared,
    )


FAMILY = replace(
    aya_vision.FAMILY,
    name="cohere2_vision",
    model_types=("cohere2_vision",),
    config=config,
    image_processors=(
        ProcessorReader(
            ("Cohere2Vision",),
            {**CLIP_PIXELS, "size": {"height": 512, "width": 512}, "max_patches": 12, "crop_to_patches": True},
            build_processor,
        ),
    ),
)
