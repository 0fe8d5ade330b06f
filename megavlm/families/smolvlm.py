"""SmolVLM and Idefics3: SigLIP for any grid, 3×3 or 4×4 pixel shuffle into one linear layer, Llama.

An image is cut into square tiles, followed by a small copy of the image; each is a separate image to the tower.
Tiles must be full, which the processors ensure if they split images (the default). Padded tiles are not supported:
Transformers masks their padding in attention and still computes features of it. SmolVLM reads a video as frames of one
tile, each after a text with its time.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np

from megavlm.arch.image_tokens import tokens_per_grid
from megavlm.config.schema import ModelConfig, ProjectorConfig
from megavlm.errors import UserError
from megavlm.families.shared.chat import template
from megavlm.families.shared.family import Family, NamePrefixes
from megavlm.families.shared.inputs import Batch, Given, pixel_values
from megavlm.families.shared.language import language, language_table
from megavlm.families.shared.settings import Settings
from megavlm.families.shared.table import Table, linear
from megavlm.families.shared.videos import Frames
from megavlm.families.shared.vision import idefics3, siglip_table
from megavlm.inputs.layout import Layout, Prompt
from megavlm.inputs.processor import Processor, cut
from megavlm.inputs.reader import HALF_PIXELS, VIDEO_SAMPLING, Json, ProcessorReader, VideoReader, has_only
from megavlm.inputs.resize import LARGEST_SIDE, Pixels, Size, longest_edge, resize_as_torchvision, whole_tiles
from megavlm.inputs.video import Budget, Clip, VideoProcessor, shown_at
from megavlm.json_files import check

AROUND, WHOLE = "<fake_token_around_image>", "<global-img>"
_UNSEEN = 1  # seconds at either end of a long video from which no frame is taken
_ONES = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"),
    *("thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"),
)
_TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")


def config(settings: Settings) -> ModelConfig:
    """Return the `ModelConfig` of a SmolVLMConfig or Idefics3Config. Only the outer tie_word_embeddings applies."""
    return ModelConfig(
        vision=idefics3(settings.section("vision_config")),
        projector=ProjectorConfig(kind="linear", pixel_shuffle=settings.get("scale_factor", 2), bias=False),
        language=language(settings.section("text_config"), tied=settings.get("tie_word_embeddings", False)),
        image_token=settings.get("image_token_id", 128257),
    )


def table(model: ModelConfig, prefixes: NamePrefixes) -> Table:
    return {
        **siglip_table(model.vision, prefixes.vision),
        **linear("projector.linear_fc1", f"{prefixes.projector}modality_projection.proj", bias=False),
        **language_table(model, prefixes),
    }


def inputs(batch: Batch, model: ModelConfig) -> Given:
    """Return the model's inputs, with all images in one sample; the features have the same order in either case."""
    pixels = {name: images[None] for name, images in pixel_values(batch, model.vision).items()}
    return {"input_ids": batch.text.tokens, **pixels}


@dataclass(frozen=True, kw_only=True)
class SplitTiles(Processor):
    """Cuts the enlarged image into tiles, each after its row and column as text; the whole image is the last tile."""

    edge: int
    tile: int
    split: bool = True
    around: str = AROUND
    whole: str = WHOLE

    def layout(self, height: int, width: int, *, images: int = 1) -> Layout:
        tile = self._tile(self.tile, self.tile)
        features = tokens_per_grid(tile.grid, self.projector)
        rows, columns = self._arrangement(longest_edge((height, width), self.edge))
        texts = []
        for row in range(1, rows + 1):
            for column in range(1, columns + 1):
                line_break = "\n" if column == 1 and row > 1 else ""
                texts.append(f"{line_break}{self.around}<row_{row}_col_{column}>")
        texts.append(("\n\n" if rows else "") + self.around + self.whole)
        prompt = Prompt(self.image_token, (*texts, self.around), (features,) * len(texts))
        return Layout((height, width), (tile,) * len(texts), (rows, columns), prompt)

    def views(self, pixels: Pixels, *, images: int = 1) -> list[Pixels]:
        picture = self._resize(pixels, *longest_edge(pixels.shape[:2], self.edge))
        rows, columns = self._arrangement(picture.shape[:2])
        if not rows:
            return [self._resize(picture, self.tile, self.tile)]
        picture = self._resize(picture, rows * self.tile, columns * self.tile)
        return [*cut(picture, (rows, columns)), self._resize(picture, self.tile, self.tile)]

    def _arrangement(self, size: Size) -> Size:
        """Return the (rows, columns) of tiles for an enlarged picture; (0, 0) for a single tile."""
        grid = whole_tiles(size, self.tile) if self.split else (1, 1)
        return (0, 0) if grid == (1, 1) else grid


def build_processor(options: Json, model: ModelConfig, shared: dict[str, Any]) -> Processor:
    size, tile = options["size"], options["max_image_size"]
    if not has_only(size, "longest_edge") or not has_only(tile, "longest_edge"):
        raise UserError("size and max_image_size in preprocessor_config.json must give longest_edge, and nothing else")
    return SplitTiles(
        edge=size["longest_edge"], tile=tile["longest_edge"], split=options["do_image_splitting"], **shared
    )


@dataclass(frozen=True, kw_only=True)
class TimedFrames(Frames):
    """Writes the time before each frame, and the number of frames and the video's length before all frames."""

    edge: int  # of the longer side of frames, which are made square afterwards

    def numbers(self, clip: Clip, budget: Budget) -> tuple[int, ...]:
        count, rate = len(clip.times), clip.rate
        frames = max(min(round(count / rate * budget.fps), budget.max_frames), 1)
        first, last = 0, count - 1
        if count / rate - 2 * _UNSEEN > budget.max_frames * budget.fps:  # as in the reference
            inside = int(_UNSEEN * rate), min(int(count - _UNSEEN * rate), count - 1)
            first, last = inside if inside[0] < inside[1] else (first, last)
        return shown_at(clip, np.linspace(first, last, frames, dtype=int).tolist())

    def resized(self, pixels: Pixels, grid: tuple[int, int]) -> Pixels:
        inside = longest_edge(pixels.shape[:2], min(self.edge, LARGEST_SIDE))
        return super().resized(resize_as_torchvision(pixels, *inside, self.resample), grid)

    def prompt(self, clip: Clip, numbers: tuple[int, ...], tokens: int) -> Prompt:
        lasts = timedelta(seconds=int(len(clip.times) / clip.rate))
        count = in_words(len(numbers))
        begin = f"You are provided the following series of {count} frames from a {lasts} [H:MM:SS] video.\n"
        moments = [int(clip.seconds(number)) for number in numbers]
        marks = [f"\nFrame from {second // 60:02d}:{second % 60:02d}:{AROUND}{WHOLE}" for second in moments]
        texts = (begin + marks[0], *(AROUND + mark for mark in marks[1:]), f"{AROUND}\n\n")
        return Prompt(self.text, texts, (tokens,) * len(numbers))


def in_words(number: int) -> str:
    """Return a number below a million in English, as `num2words` writes it: "one hundred and twenty-three"."""
    if number < 20:
        return _ONES[number]
    if number < 100:
        ten, one = divmod(number, 10)
        return _TENS[ten - 2] + (f"-{_ONES[one]}" if one else "")
    size, name = (100, "hundred") if number < 1000 else (1000, "thousand")
    many, rest = divmod(number, size)
    link = " and " if rest < 100 else ", "
    return f"{in_words(many)} {name}" + (f"{link}{in_words(rest)}" if rest else "")


def build_video(options: Json, model: ModelConfig, shared: dict[str, Any]) -> VideoProcessor:
    """Return the video processor. Published folders have the frame rate and frame count in `video_sampling`."""
    sampling = options.get("video_sampling", {})
    check(sampling, VIDEO_SAMPLING, "video_sampling in video_preprocessor_config.json")
    size = options.get("size", sampling.get("video_size", {"longest_edge": 4 * 364}))
    tile = options["max_image_size"]
    if not has_only(size, "longest_edge") or not has_only(tile, "longest_edge"):
        raise UserError(
            "size and max_image_size in video_preprocessor_config.json must give longest_edge, and nothing else"
        )
    usual = Budget(
        fps=sampling.get("fps", options.get("fps", 1.0)),
        max_frames=sampling.get("max_frames", options.get("num_frames", 64)),
    )
    fields = {**shared, "usual": usual, "size": (tile["longest_edge"],) * 2, "edge": size["longest_edge"]}
    return TimedFrames(**fields, text="<image>", as_text=True)


FAMILY = Family(
    name="smolvlm",
    model_types=("smolvlm", "idefics3"),
    config=config,
    table=table,
    inputs=inputs,
    name_prefixes=(NamePrefixes("model.vision_model.", "model.connector.", "model.text_model."),),
    image_processors=(
        ProcessorReader(
            ("Idefics3", "SmolVLM"),
            {
                **HALF_PIXELS,
                "resample": 1,
                "size": {"longest_edge": 4 * 364},
                "max_image_size": {"longest_edge": 364},
                "do_image_splitting": True,
            },
            build_processor,
        ),
    ),
    videos=VideoReader(
        ("SmolVLM",),
        ("smolvlm",),
        {**HALF_PIXELS, "resample": 1, "max_image_size": {"longest_edge": 364}},
        Budget(),
        build_video,
    ),
    chat_template=template("smolvlm", "<end_of_utterance>"),
    unused=(r".*\.rotary_emb\.inv_freq", r".*\.position_ids"),
)
