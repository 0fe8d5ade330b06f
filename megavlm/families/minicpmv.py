"""MiniCPM-V 4.6 and 4.7: SigLIP with a merger inside, a second merger after it, and Qwen3.5's hybrid language model.

A large image, or frame of a video, becomes a small copy and slices at full resolution, each a separate image to the
tower. 4.7 gives their tokens positions on one canvas (`data/collate.py`), 4.6 counts tokens. With downsample_mode 4x
the merger inside the tower is not used, and its weights are exported unchanged.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from megavlm.arch.image_tokens import tokens_per_grid
from megavlm.arch.layers import VISION_MERGER
from megavlm.config.schema import ModelConfig, ProjectorConfig
from megavlm.errors import UserError
from megavlm.families import qwen3_5
from megavlm.families.shared.chat import CHATML
from megavlm.families.shared.family import Family, NamePrefixes
from megavlm.families.shared.inputs import Batch, Given, feature_kinds
from megavlm.families.shared.language import language_table
from megavlm.families.shared.qwen_vl import IMAGE
from megavlm.families.shared.settings import Settings, refuse
from megavlm.families.shared.table import Table, linear
from megavlm.families.shared.videos import TEXT as VIDEO
from megavlm.families.shared.vision import minicpm, qkv, siglip_table
from megavlm.inputs.layout import Layout, Prompt, Tile
from megavlm.inputs.patches import cells_of
from megavlm.inputs.processor import Processor, cut, holdable
from megavlm.inputs.reader import HALF_PIXELS, Json, ProcessorReader, VideoReader, require_model_value
from megavlm.inputs.resize import Pixels, Size, resize_as_torchvision
from megavlm.inputs.video import Budget, Clip, VideoProcessor, shown_at

Resize = Callable[[Pixels, int, int], Pixels]  # to a height and a width
_SIDES = {"16x": 4, "4x": 2}  # side of a feature in patches, by downsample_mode
# Marker tokens around features, from which the canvas layout follows; the first one precedes a slice.
_MARKS = ("slice_start_id", "slice_end_id", "image_start_id", "image_end_id", "newline_id")


def config(settings: Settings) -> ModelConfig:
    """Return the `ModelConfig` of a MiniCPMV4_6Config, which has no M-RoPE: positions count tokens."""
    model = canvas_config(settings, marks=())
    return replace(model, language=replace(model.language, mrope_section=(), mrope_interleaved=False))


def canvas_config(settings: Settings, *, marks: tuple[str, ...] = _MARKS) -> ModelConfig:
    """Return the `ModelConfig` of a MiniCPMV4_7Config.

    tie_word_embeddings and insert_layer_id are read from the top level, not from sections.
    """
    side = _SIDES.get(settings.get("downsample_mode", "16x"))
    if side is None:
        refuse(settings, "downsample_mode", f"known are {', '.join(_SIDES)}")
    for name, section in (("merge_kernel_size", settings), ("window_kernel_size", settings.section("vision_config"))):
        if section.square(name, 2) != 2:
            refuse(section, name, "only blocks of 2×2 patches are known here")
    settings.require("merger_times", 1, why="only one merger behind the tower is known here")
    after = settings.get("insert_layer_id", 6)
    if after < 0:
        refuse(settings, "insert_layer_id", "the merger follows a layer of the tower; downsample_mode 4x leaves it out")
    vision = minicpm(settings.section("vision_config"), merger_layer=after if side == 4 else None)
    projector = ProjectorConfig(
        kind="mlp",
        hidden_size=4 * vision.hidden_size,
        pixel_shuffle=side,
        input_norm=True,
        norm_epsilon=1e-6,
    )
    return ModelConfig(
        vision=vision,
        projector=projector,
        language=qwen3_5.text_model(settings.section("text_config"), tied=settings.get("tie_word_embeddings", False)),
        image_token=settings.need("image_token_id"),
        video_token=settings.get("video_token_id", None),
        canvas_tokens=tuple(settings.need(name) for name in marks),
    )


def table(model: ModelConfig, prefixes: NamePrefixes) -> Table:
    vision, tower = model.vision, prefixes.vision
    names = siglip_table(vision, tower) | language_table(model, prefixes)
    for ours, theirs in (("norm", "pre_norm"), ("linear_fc1", "linear_1"), ("linear_fc2", "linear_2")):
        names |= linear(f"projector.{ours}", f"{prefixes.projector}mlp.0.{theirs}", bias=True)
    if vision.merger_layer is None:
        return names
    names |= qkv(
        f"{VISION_MERGER}.self_attention.linear_qkv", f"{tower}vit_merger.self_attn.{{}}_proj", vision, bias=True
    )
    for ours, theirs in (
        ("self_attention.linear_proj", "self_attn.out_proj"),
        ("input_layernorm", "layer_norm1"),
        ("pre_mlp_layernorm", "pre_norm"),
        ("mlp.linear_fc1", "linear_1"),
        ("mlp.linear_fc2", "linear_2"),
    ):
        names |= linear(f"{VISION_MERGER}.{ours}", f"{tower}vit_merger.{theirs}", bias=True)
    return names


def inputs(batch: Batch, model: ModelConfig) -> Given:
    """Return tokens, their types, and the patches of images and of videos side by side: [1, C, p, P·p]."""
    import torch

    tokens, grids, vision = batch.text.tokens, batch.image_sizes.grids, model.vision
    if not grids:
        return {"input_ids": tokens}
    assert batch.images is not None
    kinds, kind_of_grid = feature_kinds(batch, model)
    patches = batch.images.patches.unflatten(1, (vision.in_channels, vision.patch_size, -1))
    sizes = torch.tensor(grids, device=tokens.device)
    kind_of_patch = kind_of_grid.repeat_interleave(sizes.prod(1))
    given = {"input_ids": tokens} | ({"mm_token_type_ids": kinds} if model.canvas_tokens else {})
    for kind, pixels, name in ((1, "pixel_values", "target_sizes"), (2, "pixel_values_videos", "target_sizes_videos")):
        seen = patches[kind_of_patch == kind]
        if len(seen):
            given |= {pixels: seen.permute(1, 2, 0, 3).flatten(2)[None], name: sizes[kind_of_grid == kind]}
    return given


@dataclass(frozen=True)
class Cutting:
    """Rule for cutting an image: into a small copy of about `scale`² pixels, and at most `most` slices of that area.

    All sides are multiples of `unit` pixels, the side of a feature.
    """

    scale: int
    most: int  # 1: pictures are not cut
    unit: int

    def arrangement(self, size: Size) -> Size:
        """Return the (rows, columns) of slices that are closest to squares; (0, 0) for a picture that is not cut."""
        height, width = size
        wanted = min(math.ceil(height * width / self.scale**2), self.most)
        if wanted < 2:
            return 0, 0
        counts = [count for count in (wanted - 1, wanted, wanted + 1) if 1 < count <= self.most]
        grids = [(rows, count // rows) for count in counts for rows in range(1, count + 1) if count % rows == 0]

        def error(grid: Size) -> tuple[float, int]:
            return abs(math.log(width / height) - math.log(grid[1] / grid[0])), -grid[0]

        return min(grids, key=error)

    def sizes(self, size: Size) -> tuple[Size, Size]:
        """Return the sizes of the small copy and of each slice. Without slices the copy may be enlarged."""
        rows, columns = self.arrangement(size)
        if not rows:
            whole = holdable(size, self._fitted(size, enlarge=True))
            return whole, whole
        part = _multiple(size[0], rows) / rows, _multiple(size[1], columns) / columns
        return holdable(size, self._fitted(size, enlarge=False)), holdable(size, self._fitted(part, enlarge=True))

    def _fitted(self, size: tuple[float, float], *, enlarge: bool) -> Size:
        height, width = size
        if enlarge or height * width > self.scale**2:
            ratio = width / height
            height = int(self.scale / math.sqrt(ratio))
            width = int(height * ratio)
        return _multiple(height, self.unit), _multiple(width, self.unit)

    def views(self, pixels: Pixels, resized: Resize) -> list[Pixels]:
        """Return the small copy of a picture and its slices."""
        (rows, columns), (whole, part) = self.arrangement(pixels.shape[:2]), self.sizes(pixels.shape[:2])
        slices = cut(resized(pixels, rows * part[0], columns * part[1]), (rows, columns)) if rows else []
        return [resized(pixels, *whole), *slices]

    def texts(self, arrangement: Size) -> tuple[str, ...]:
        """Return the text before the features of the copy and of each slice, and the text after the last of them."""
        rows, columns = arrangement
        ends = ["</slice>\n" if number % columns == 0 else "</slice>" for number in range(1, rows * columns)]
        slices = ["</image>", *ends, "</slice>"] if rows else ["</image>"]
        return ("<image>", *(f"{end}<slice>" for end in slices[:-1]), slices[-1])


def _multiple(length: float, of: int) -> int:
    return max(round(length / of) * of, of)


@dataclass(frozen=True, kw_only=True)
class Slices(Processor):
    """Cuts an image into slices, preceded by a small copy of the image; marker tokens surround each of them."""

    whole_first: ClassVar[bool] = True

    cutting: Cutting
    numbers_images: bool
    numbers_videos: bool

    def layout(self, height: int, width: int, *, images: int = 1) -> Layout:
        whole, part = (self._tile(*sides) for sides in self.cutting.sizes((height, width)))
        rows, columns = grid = self.cutting.arrangement((height, width))
        tiles = (whole, *(part,) * (rows * columns))
        runs = tuple(tokens_per_grid(tile.grid, self.projector) for tile in tiles)
        return Layout((height, width), tiles, grid, Prompt(self.image_token, self.cutting.texts(grid), runs))

    def views(self, pixels: Pixels, *, images: int = 1) -> list[Pixels]:
        return self.cutting.views(pixels, self._resize)

    def numbered(self, layout: Layout, number: int) -> Layout:
        if not (self.numbers_images if layout.film is None else self.numbers_videos):
            return layout
        first, *others = layout.prompt.texts
        texts = (f"<image_id>{number}</image_id>{first}", *others)
        return replace(layout, prompt=replace(layout.prompt, texts=texts))


def _cutting(options: Json, model: ModelConfig, file: str) -> Cutting:
    require_model_value(options, "patch_size", model.vision.patch_size)
    if _SIDES.get(options["downsample_mode"]) != model.projector.pixel_shuffle:
        raise UserError(f"downsample_mode {options['downsample_mode']!r:.80} in {file} is not that of config.json")
    most = options["max_slice_nums"] if options["slice_mode"] else 1
    return Cutting(options["scale_resolution"], most, model.vision.patch_size * model.projector.pixel_shuffle)


def build_processor(options: Json, model: ModelConfig, shared: dict[str, Any]) -> Processor:
    return Slices(
        cutting=_cutting(options, model, "preprocessor_config.json"),
        numbers_images=options["use_image_id"],
        numbers_videos=options["use_image_id"] and not model.canvas_tokens,
        placeholder=IMAGE,
        image_token=IMAGE,
        **shared,
    )


@dataclass(frozen=True, kw_only=True)
class SlicedFrames(VideoProcessor):
    """Cuts each sampled frame like an image: one frame a second, or evenly spaced frames of a long video."""

    cutting: Cutting
    number: int  # the video token

    def numbers(self, clip: Clip, budget: Budget) -> tuple[int, ...]:
        count, fps, most = len(clip.times), min(budget.fps, clip.rate), budget.max_frames
        seconds = count / clip.rate
        if budget.max_tokens is not None:
            most = min(most, max(budget.max_tokens // sum(self._runs(clip)), 1))
        places = [int(number * clip.rate / fps) for number in range(math.ceil(seconds * fps))]
        if seconds * fps > most:  # tenths of seconds, as the reference counts them
            places = [int(round(number * 0.1, 1) * clip.rate) for number in range(int(seconds / 0.1))] or [0]
            places = [places[at] for at in np.linspace(0, len(places) - 1, min(most, len(places)), dtype=int)]
        return shown_at(clip, [min(place, count - 1) for place in places])

    def frame_size(self, size: Size, frames: int, budget: Budget) -> Size:
        return self.cutting.sizes(size)[0]

    def most_groups(self, tokens: int) -> int:
        return tokens

    def slices(self, size: Size) -> tuple[Size, tuple[Tile, ...]]:
        rows, columns = self.cutting.arrangement(size)
        return (rows, columns), (self._tile(*self.cutting.sizes(size)[1]),) * (rows * columns)

    def prompt(self, clip: Clip, numbers: tuple[int, ...], tokens: int) -> Prompt:
        begin, *inside, end = self.cutting.texts(self.cutting.arrangement((clip.height, clip.width)))
        texts = (begin, *(*inside, end + begin) * (len(numbers) - 1), *inside, end)
        return Prompt(self.text, texts, self._runs(clip) * len(numbers), self.number)

    def _runs(self, clip: Clip) -> tuple[int, ...]:
        size = clip.height, clip.width
        return tuple(self._tokens(tile) for tile in (self._tile(*self.cutting.sizes(size)[0]), *self.slices(size)[1]))

    def frame(self, pixels: Pixels, grid: tuple[int, int]) -> NDArray[np.uint8]:
        def resized(picture: Pixels, height: int, width: int) -> Pixels:
            return resize_as_torchvision(picture, height, width, self.resample)

        return np.concatenate([cells_of(view, self.patch_size) for view in self.cutting.views(pixels, resized)])


def build_video(options: Json, model: ModelConfig, shared: dict[str, Any]) -> VideoProcessor | None:
    if model.video_token is None:
        return None
    file = "video_preprocessor_config.json"
    if options["stack_frames"] != 1:
        raise UserError(f"stack_frames {options['stack_frames']} in {file} is not supported: set it to 1")
    usual = Budget(fps=1.0, max_frames=options["max_num_frames"], min_frames=1)
    fields = {**shared, "usual": usual, "cutting": _cutting(options, model, file)}
    return SlicedFrames(**fields, text=VIDEO, number=model.video_token)


_OPTIONS: Json = {
    **HALF_PIXELS,
    **{"max_slice_nums": 9, "scale_resolution": 448, "patch_size": 14, "slice_mode": True, "downsample_mode": "16x"},
    "use_image_id": True,
}

FAMILY = Family(
    name="minicpmv4_6",
    model_types=("minicpmv4_6",),
    config=config,
    table=table,
    inputs=inputs,
    name_prefixes=(NamePrefixes("model.vision_tower.", "model.merger.", "model.language_model."),),
    image_processors=(ProcessorReader(("MiniCPMV4_6",), _OPTIONS, build_processor),),
    videos=VideoReader(
        ("MiniCPMV4_6",),
        ("minicpmv4_6", "minicpmv4_7"),
        {**_OPTIONS, "max_num_frames": 128, "stack_frames": 1},
        Budget(),
        build_video,
    ),
    image_text=IMAGE,
    chat_template=CHATML,
    unused=(r"model\.vision_tower\.vit_merger\..*",),
)

CANVAS = replace(FAMILY, name="minicpmv4_7", model_types=("minicpmv4_7",), config=canvas_config)
