"""InternVL2.5, 3 and 3.5 (-hf checkpoints): InternViT, pixel shuffle, norm, MLP; Qwen2.5, Qwen3, Qwen3-MoE or gpt-oss.

Each frame of a video is an image of one tile, and its number is written before it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megavlm.arch.image_tokens import tokens_per_grid
from megavlm.config.schema import ModelConfig, ProjectorConfig
from megavlm.families import llava
from megavlm.families.shared.chat import CHATML
from megavlm.families.shared.family import Family, NamePrefixes, llava_prefixes
from megavlm.families.shared.inputs import tokens_and_pixels
from megavlm.families.shared.language import experts, language
from megavlm.families.shared.settings import Settings, refuse
from megavlm.families.shared.table import Table, linear
from megavlm.families.shared.videos import Frames, frame_fields
from megavlm.families.shared.vision import intern, intern_table
from megavlm.inputs.layout import Layout, Prompt
from megavlm.inputs.processor import Processor, cut
from megavlm.inputs.reader import CLIP_PIXELS, Json, ProcessorReader, VideoReader, sides
from megavlm.inputs.resize import Pixels, Size, tile_grid
from megavlm.inputs.video import Budget, Clip, VideoProcessor, in_the_middle

IMAGE = "<IMG_CONTEXT>"


def config(settings: Settings) -> ModelConfig:
    """Return the `ModelConfig` of an InternVLConfig."""
    settings.require("projector_hidden_act", "gelu", why="only GELU projectors are known here")
    settings.require("vision_feature_select_strategy", "default", why="the class token as a feature is not known here")
    factor = 1 / settings.get("downsample_ratio", 0.5)
    if factor != int(factor):
        refuse(settings, "downsample_ratio", "it must be 1/N")
    text = settings.section("text_config")
    # The outer setting takes precedence; checkpoints from before Transformers 5 have only the inner one.
    tied = settings.get("tie_word_embeddings", text.get("tie_word_embeddings", False))
    return ModelConfig(
        vision=intern(settings.section("vision_config"), feature_layer=settings.get("vision_feature_layer", -1)),
        projector=ProjectorConfig(kind="mlp", pixel_shuffle=int(factor), input_norm=True),
        language=language(text, tied=tied),
        experts=experts(text),
        image_token=settings.get("image_token_id", 151667),
    )


def table(model: ModelConfig, prefixes: NamePrefixes) -> Table:
    return {
        **llava.whole_table(intern_table(model.vision, prefixes.vision), model, prefixes),
        **linear("projector.norm", f"{prefixes.projector}layer_norm", bias=True),
    }


@dataclass(frozen=True, kw_only=True)
class DynamicTiles(Processor):
    """Stretches an image to the best grid of tiles; if it has several tiles, adds a thumbnail of the image."""

    tile: Size
    fewest: int
    most: int
    start: str = "<img>"
    end: str = "</img>"

    def layout(self, height: int, width: int, *, images: int = 1) -> Layout:
        tile = self._tile(*self.tile)
        rows, columns = self._arrangement((height, width))
        tiles = (tile,) * (rows * columns + (rows * columns > 1))
        features = len(tiles) * tokens_per_grid(tile.grid, self.projector)
        prompt = Prompt(self.image_token, (self.start, self.end), (features,))
        return Layout((height, width), tiles, (rows, columns) if len(tiles) > 1 else (0, 0), prompt)

    def views(self, pixels: Pixels, *, images: int = 1) -> list[Pixels]:
        rows, columns = self._arrangement(pixels.shape[:2])
        picture = self._resize(pixels, self.tile[0] * rows, self.tile[1] * columns)
        if rows * columns == 1:
            return [picture]
        return [*cut(picture, (rows, columns)), self._resize(pixels, *self.tile)]

    def _arrangement(self, size: Size) -> Size:
        return tile_grid(size, self.tile, fewest=self.fewest, most=self.most)


def build_processor(options: Json, model: ModelConfig, shared: dict[str, Any]) -> Processor:
    """Return the image processor. Like InternVL's own one it always cuts, whatever `crop_to_patches` in the file is."""
    return DynamicTiles(
        tile=sides(options["size"], "size"),
        fewest=options["min_patches"],
        most=options["max_patches"],
        placeholder=IMAGE,
        image_token=IMAGE,
        **shared,
    )


@dataclass(frozen=True, kw_only=True)
class NumberedFrames(Frames):
    """Writes the number of each frame before the frame."""

    start: str = "<img>"
    end: str = "</img>"

    def places(self, count: int, frames: int) -> list[int]:
        return in_the_middle(count, frames)

    def prompt(self, clip: Clip, numbers: tuple[int, ...], tokens: int) -> Prompt:
        names = [f"Frame{number}: {self.start}" for number in range(1, len(numbers) + 1)]
        texts = (names[0], *(f"{self.end}\n{name}" for name in names[1:]), self.end)
        return Prompt(self.text, texts, (tokens,) * len(numbers))


def build_video(options: Json, model: ModelConfig, shared: dict[str, Any]) -> VideoProcessor:
    return NumberedFrames(**frame_fields(options), **shared, text=IMAGE)


FAMILY = Family(
    name="internvl",
    model_types=("internvl",),
    config=config,
    table=table,
    inputs=tokens_and_pixels,
    name_prefixes=llava_prefixes("vision_tower."),
    image_processors=(
        ProcessorReader(
            ("GotOcr2",),
            {**CLIP_PIXELS, "size": {"height": 384, "width": 384}, "min_patches": 1, "max_patches": 12},
            build_processor,
        ),
    ),
    image_text=IMAGE,
    videos=VideoReader(
        ("InternVL",),
        ("internvl",),
        {**CLIP_PIXELS, "size": {"height": 384, "width": 384}},
        Budget(fps=2.0, max_frames=32, min_frames=1),
        build_video,
    ),
    chat_template=CHATML,
    unused=(r".*vision_tower\.encoder\.layer\..*", r".*vision_tower\.layernorm\..*", r".*\.embeddings\.mask_token"),
)
