"""LLaVA-OneVision: SigLIP without its last norm, a two-layer MLP, tiled images with newlines, Qwen2.

Video frames are not tiled. Their feature maps are resized to half the side, and one newline ends a video.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, ClassVar

from megavlm.arch.image_tokens import TileGroup, Tiling, half, tokens_per_image
from megavlm.config.schema import ModelConfig
from megavlm.errors import UserError
from megavlm.families import llava
from megavlm.families.shared.chat import CHATML
from megavlm.families.shared.family import Family, NamePrefixes
from megavlm.families.shared.inputs import Batch, Given, unpatchify
from megavlm.families.shared.settings import Settings, refuse
from megavlm.families.shared.table import Rename, Table
from megavlm.families.shared.videos import Frames, frame_fields
from megavlm.inputs.bad_sample import BadSample, Reason
from megavlm.inputs.layout import Layout, Prompt, Tile
from megavlm.inputs.processor import Processor, cut, pad_evenly, pad_to_square, squared
from megavlm.inputs.reader import CLIP_PIXELS, Json, ProcessorReader, VideoReader, sides, square
from megavlm.inputs.resize import Pixels, Size, best_resolution, fit_inside
from megavlm.inputs.video import Budget, Clip, VideoProcessor

# (height, width) if a folder has no resolutions.
DEFAULT_RESOLUTIONS = tuple(product(range(384, 2305, 384), repeat=2))


def config(settings: Settings) -> ModelConfig:
    """Return the `ModelConfig` of a LlavaOnevisionConfig.

    Its image_grid_pinpoints are not part of it: a batch says how its images are tiled.
    """
    text, tower = settings.section("text_config"), settings.section("vision_config")
    tower.require("model_type", "siglip_vision_model", why="only SigLIP towers are known here")
    defaults = {
        "vision_config": {"model_type": "siglip_vision_model", **tower.values},
        "text_config": {"model_type": "qwen2", **text.values},
        "vision_feature_select_strategy": "full",
        "vision_feature_layer": -1,
        "image_token_index": settings.get("image_token_id", 151646),
    }
    given = {name: value for name, value in settings.values.items() if value is not None and "_config" not in name}
    model = llava.config(Settings({**defaults, **given}, settings.where))
    return replace(
        model,
        projector=replace(model.projector, anyres_max_tiles=_max_tiles(settings)),
        video_token=settings.get("video_token_index", settings.get("video_token_id", 151647)),
    )


def _max_tiles(settings: Settings) -> int:
    found = re.fullmatch(r"anyres_max_([1-9]\d*)", settings.get("vision_aspect_ratio", "anyres_max_9"))
    if found is None:
        refuse(settings, "vision_aspect_ratio", "only anyres_max_N is known here")
    return int(found[1])


def tiling(settings: Settings) -> Tiling:
    """Return a function from an image's size to its tile grid, that of the best size in `image_grid_pinpoints`.

    Transformers' model computes the same grid itself.
    """
    side = settings.section("vision_config").get("image_size", DEFAULT_RESOLUTIONS[0][0])
    resolutions = [(height, width) for height, width in settings.get("image_grid_pinpoints", DEFAULT_RESOLUTIONS)]

    def of(size: tuple[int, int]) -> tuple[int, int]:
        height, width = best_resolution(size, resolutions)
        return height // side, width // side

    return of


def table(model: ModelConfig, prefixes: NamePrefixes) -> Table:
    newline = prefixes.projector.removesuffix("multi_modal_projector.") + "image_newline"
    return {**llava.table(model, prefixes), "projector.image_newline": Rename(newline)}


def inputs(batch: Batch, model: ModelConfig) -> Given:
    """Return the model's inputs, with the number of images of each sample: Transformers only tiles single images.

    Raises UserError for videos of different lengths, which Transformers does not accept in one batch.
    """
    import torch

    groups, counts = batch.image_sizes.tile_groups, batch.image_sizes.image_tokens(model.projector)
    given = {"input_ids": batch.text.tokens}
    pixels = iter(unpatchify(batch, model.vision) if groups else ())
    tiles = [[next(pixels) for _ in range(group.tiles)] for group in groups]
    images = [number for number, group in enumerate(groups) if group.kind == "image"]
    if images:
        ends = torch.tensor([counts[number] for number in images]).cumsum(0)
        image_tokens = torch.eq(batch.text.tokens, model.image_token or 0).sum(1).cumsum(0).cpu()
        given["batch_num_images"] = torch.searchsorted(ends, image_tokens, right=True).diff(prepend=torch.tensor([0]))
        given["image_sizes"] = torch.tensor([groups[number].size for number in images])
        given["pixel_values"] = torch.stack([tile for number in images for tile in tiles[number]])
    if len(images) < len(groups):
        frames = [tile for tile, group in zip(tiles, groups, strict=True) if group.kind != "image"]
        lasts = [group.kind == "last frame" for group in groups if group.kind != "image"]
        length = lasts.index(True) + 1
        if lasts != ([False] * (length - 1) + [True]) * (len(lasts) // length):
            raise UserError("Transformers takes videos of one length at a time: ask about them one by one")
        given["pixel_values_videos"] = torch.stack([frame for (frame,) in frames]).unflatten(0, (-1, length))
    return given


@dataclass(frozen=True, kw_only=True)
class Anyres(Processor):
    """Resizes an image to one tile, then to the best of the given resolutions, which is cut into further tiles.

    `megavlm/arch/image_tokens.py` decides which features of the tiles are kept. In a sample with several images, each
    image is padded to a square and is a single tile.
    """

    anyres: ClassVar[bool] = True
    whole_first: ClassVar[bool] = True

    tile: int
    resolutions: tuple[Size, ...]

    def layout(self, height: int, width: int, *, images: int = 1) -> Layout:
        tile = self._tile(self.tile, self.tile)
        if images > 1:
            squared((height, width))
        arrangement = (0, 0) if images > 1 else self._arrangement((height, width))
        group = TileGroup(arrangement, (height, width))
        try:
            features = sum(tokens_per_image([tile.grid] * group.tiles, [group], self.projector))
        except UserError as error:  # the image has no features, so its sample is left out
            raise BadSample(Reason.TOO_NARROW, str(error)) from error
        return Layout((height, width), (tile,) * group.tiles, arrangement, self._one_run(features))

    def views(self, pixels: Pixels, *, images: int = 1) -> list[Pixels]:
        if images > 1:
            return [self._whole(pad_to_square(pixels, self.mean))]
        arrangement = self._arrangement(pixels.shape[:2])
        frame = arrangement[0] * self.tile, arrangement[1] * self.tile
        picture = self._resize(pixels, *fit_inside(pixels.shape[:2], frame))
        return [self._whole(pixels), *cut(pad_evenly(picture, frame), arrangement)]

    def _whole(self, pixels: Pixels) -> Pixels:
        return self._resize(pixels, self.tile, self.tile)

    def _arrangement(self, size: Size) -> Size:
        height, width = best_resolution(size, self.resolutions)
        return height // self.tile, width // self.tile


def build_processor(options: Json, model: ModelConfig, shared: dict[str, Any]) -> Processor:
    """Return the image processor. Raises UserError if a resolution is not a multiple of the tile."""
    tile = square(sides(options["size"], "size"), "size")
    resolutions = tuple((int(height), int(width)) for height, width in options["image_grid_pinpoints"])
    if not resolutions or any(height % tile or width % tile for height, width in resolutions):
        raise UserError(f"image_grid_pinpoints in preprocessor_config.json must be multiples of size {tile}")
    return Anyres(tile=tile, resolutions=resolutions, **shared)


@dataclass(frozen=True, kw_only=True)
class HalvedFrames(Frames):
    """Makes a video one run of tokens: the halved feature maps of its frames, and a newline."""

    number: int

    def prompt(self, clip: Clip, numbers: tuple[int, ...], tokens: int) -> Prompt:
        return Prompt(self.text, ("", ""), (len(numbers) * tokens + 1,), self.number)

    def most_groups(self, tokens: int) -> int:
        return super().most_groups(tokens - 1)

    def _tokens(self, tile: Tile) -> int:
        return half(tile.grid[0]) ** 2


def build_video(options: Json, model: ModelConfig, shared: dict[str, Any]) -> VideoProcessor | None:
    """Return the video processor; None for a model without a video token. Raises UserError if frames are not square."""
    if model.video_token is None:
        return None
    fields = frame_fields(options)
    square(fields["size"], "size")
    return HalvedFrames(**fields, **shared, text="<video>", number=model.video_token)


FAMILY = Family(
    name="llava_onevision",
    model_types=("llava_onevision",),
    config=config,
    table=table,
    inputs=inputs,
    tiling=tiling,
    name_prefixes=llava.FAMILY.name_prefixes,
    image_processors=(
        ProcessorReader(
            ("LlavaOnevision",),
            {
                **CLIP_PIXELS,
                "size": {"height": 384, "width": 384},
                "image_grid_pinpoints": DEFAULT_RESOLUTIONS,
            },
            build_processor,
        ),
    ),
    videos=VideoReader(
        ("LlavaOnevision",),
        ("llava_onevision",),
        {**CLIP_PIXELS, "size": {"height": 384, "width": 384}},
        Budget(fps=1.0, max_frames=32, min_frames=1),
        build_video,
    ),
    chat_template=CHATML,
    # Layers after the feature layer, and the modules of SigLIP's pooled output.
    unused=(
        r".*vision_tower\.(vision_model\.)?(encoder\.layers|post_layernorm|head)\..*",
        r".*\.position_ids|.*\.rotary_emb\.inv_freq",
    ),
)
