"""Kimi-K2.5 and K2.6: MoonViT, a 2×2 merger with its norm, and DeepSeek-V3 as language model, for images and videos.

MoonViT is a ViT at native resolution with learned and rotary positions. It rotates neighbouring channels, and published
files have its queries, keys and values in one tensor. A model loaded by Transformers has a tensor of each, and rotates
the halves of a head. Patches attend to all frames of a chunk of a video, whose mean is merged (`Grid`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from time import gmtime, strftime
from types import SimpleNamespace
from typing import Any

from megavlm.arch.image_tokens import chunk_lengths, tokens_per_grid
from megavlm.arch.layers import VISION_NORM
from megavlm.config.schema import ModelConfig, ProjectorConfig, VisionConfig
from megavlm.errors import UserError
from megavlm.families.shared.chat import template
from megavlm.families.shared.family import Family, NamePrefixes
from megavlm.families.shared.inputs import Batch, Given
from megavlm.families.shared.language import experts, language, language_table
from megavlm.families.shared.qwen_vl import UNGATED
from megavlm.families.shared.settings import Settings, refuse
from megavlm.families.shared.table import FusedQKV, Rename, Table, linear
from megavlm.families.shared.vision import blocks, kernel, mlp, norms, qkv, sizes
from megavlm.inputs.layout import Layout, Prompt, Tile
from megavlm.inputs.processor import Processor, pasted
from megavlm.inputs.reader import (
    HALF_PIXELS,
    OPTIONS,
    Json,
    ProcessorReader,
    VideoReader,
    has_only,
    require_model_value,
)
from megavlm.inputs.resize import Pixels, Size, resize_as_torchvision
from megavlm.inputs.video import Budget, Clip, VideoProcessor, first_of_parts, taken
from megavlm.json_files import OBJECT, check, whole

IMAGE = "<|media_pad|>"
START, END = "<|media_begin|>video<|media_content|>", "<|media_end|>"  # around the features of a chunk
# The names of published files, those that Transformers 5.23 saves, and those of a model that it has loaded.
PUBLISHED = NamePrefixes("vision_tower.", "mm_projector.", "language_model.model.", "language_model.lm_head.weight")
SAVED = replace(PUBLISHED, projector="model.mm_projector.")
LOADED = NamePrefixes("model.vision_tower.", "model.mm_projector.", "model.language_model.", experts="stacked")
# Transformers' names of a tower's settings for those of published files.
_TOWER = {
    **{f"vt_{name}": name for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")},
    **{f"init_{name}": name for name in ("pos_emb_height", "pos_emb_width", "pos_emb_time")},
}
_CHUNK = 4  # most frames of a chunk
# What is computed for chunks, as published files name it.
_OF_VIDEOS = {"pos_emb_time": _CHUNK, "pos_emb_type": "divided_fixed", "merge_type": "sd2_tpool"}
_OF_VIDEOS |= {"video_attn_type": "spatial_temporal"}


def config(settings: Settings) -> ModelConfig:
    """Return the `ModelConfig` of a Kimi_K25Config, or of the config.json of published folders."""
    text, tower = settings.section("text_config"), settings.section("vision_config")
    text.require("model_type", "deepseek_v3", "kimi_k2", why="only DeepSeek-V3 is known here")
    text = Settings({**text.values, "model_type": "deepseek_v3"}, text.where)
    of_tower = Settings({_TOWER.get(name, name): value for name, value in tower.values.items()}, tower.where)
    for name, value in _OF_VIDEOS.items():
        of_tower.require(name, value, why=f"only {value} is known here")
    vision = moonvit(of_tower)
    for section, name in ((settings, "projection_hidden_size"), (tower, "mm_hidden_size")):
        section.require(name, vision.hidden_size, why=f"the projector reads the tower's {vision.hidden_size}")
    tower.require("projector_hidden_act", "gelu", why="only GELU projectors are known here")
    tower.require("mm_projector_type", "patchmerger", why="only a norm of patches and an MLP are known here")
    side = tower.square("merge_kernel_size", 2)
    return ModelConfig(
        vision=vision,
        projector=ProjectorConfig(
            kind="mlp",
            hidden_size=vision.hidden_size * side**2,
            pixel_shuffle=side,
            input_norm=True,
            norm_before_merge=True,
            norm_epsilon=settings.get("projection_layer_norm_eps", tower.get("projector_ln_eps", 1e-5)),
        ),
        language=language(text, tied=settings.get("tie_word_embeddings", True)),
        experts=experts(text),
        image_token=settings.get("image_token_id", settings.get("media_placeholder_token_id", 163605)),
    )


def moonvit(tower: Settings) -> VisionConfig:
    """Return the vision tower of a Kimi_K25VisionConfig."""
    side = tower.get("pos_emb_height", 64)
    if tower.get("pos_emb_width", 64) != side:
        refuse(tower, "pos_emb_width", f"the table of positions must be square, {side} high and wide")
    found = sizes(tower, layers=27, width=1152, inner=4304, heads=16, image=1, patch=14)
    activation = tower.choice("hidden_act", UNGATED, "gelu_pytorch_tanh")
    return VisionConfig(
        **{**found, "image_size": side * found["patch_size"], "activation": activation},
        position_embedding="learned_rope2d",
        rotary_neighbours=True,
        rotary_base=float(tower.section("rope_parameters").get("rope_theta", 10000.0)),
        norm_epsilon=1e-5,
    )


def table(model: ModelConfig, prefixes: NamePrefixes) -> Table:
    saved, loaded = prefixes == SAVED, prefixes.vision == LOADED.vision
    first, second = ("in_proj", "out_proj") if loaded else ("proj.0", "proj.2")
    linears = prefixes.projector if loaded else PUBLISHED.projector
    return {
        **_vision_table(model.vision, prefixes.vision, saved=saved, loaded=loaded),
        **linear("projector.norm", f"{prefixes.projector}pre_norm", bias=True),
        **linear("projector.linear_fc1", f"{linears}{first}", bias=True),
        **linear("projector.linear_fc2", f"{linears}{second}", bias=True),
        **language_table(model, prefixes, layers="blocks" if saved else "layers"),
    }


def _vision_table(vision: VisionConfig, prefix: str, *, saved: bool, loaded: bool) -> Table:
    """Return the table of a tower whose file names begin with `prefix`, with the names of `SAVED` or `LOADED`."""
    side = vision.image_size // vision.patch_size
    encoder = prefix if loaded else f"{prefix}encoder."
    first, grid = f"{encoder if saved else prefix}patch_embed.proj", (side, side, vision.hidden_size)
    position = f"{prefix}patch_embed.pos_emb.{'position_embeddings' if loaded else 'weight'}"
    width = vision.hidden_size // vision.num_attention_heads
    in_halves = tuple(channel % 2 * (width // 2) + channel // 2 for channel in range(width))
    names: Table = {
        "patch_embed.proj.weight": Rename(f"{first}.weight", view=kernel(vision)),
        "patch_embed.proj.bias": Rename(f"{first}.bias"),
        "patch_embed.position": Rename(position, view=grid),
        **linear(VISION_NORM, f"{encoder}final_layernorm", bias=True),
    }
    for layer, hf_layer in blocks(vision, f"{encoder}{'layers' if loaded else 'blocks'}."):
        attention = f"{layer}self_attention.linear_"
        if loaded:
            names |= qkv(f"{attention}qkv", f"{hf_layer}attn.{{}}_proj", vision, bias=True, order=in_halves)
        else:
            for leaf in ("weight", "bias"):
                names[f"{attention}qkv.{leaf}"] = FusedQKV(f"{hf_layer}wqkv.{leaf}", heads=vision.num_attention_heads)
        names |= linear(f"{attention}proj", f"{hf_layer}{'attn.proj' if loaded else 'wo'}", bias=True)
        one, two = (1, 2) if loaded else (0, 1)
        names |= norms(vision, layer, f"{hf_layer}norm{one}", f"{hf_layer}norm{two}")
        names |= mlp(layer, hf_layer, (f"fc{one}", f"fc{two}"))
    return names


def inputs(batch: Batch, model: ModelConfig) -> Given:
    """Return tokens, and patches in row-major order. Chunks of videos are given as images of several frames."""
    import torch

    tokens, grids, vision = batch.text.tokens, batch.image_sizes.grids, model.vision
    if batch.images is None or not grids:
        return {"input_ids": tokens}
    return {
        "input_ids": tokens,
        "pixel_values": batch.images.patches.unflatten(1, (vision.in_channels, vision.patch_size, vision.patch_size)),
        "image_grid_thw": torch.tensor([(math.prod(grid[2:]), *grid[:2]) for grid in grids], device=tokens.device),
    }


def complete(model: Any) -> None:
    """Give a Transformers model the features of videos, chunk by chunk. Version 5.23 refuses chunks of unlike numbers
    of frames, and divides features as if each frame had its own.
    """
    inner, of_images = model.model, model.model.get_image_features

    def get_features(pixel_values: Any, image_grid_thw: Any, **options: Any) -> Any:  # `generate` reads these names
        if bool((image_grid_thw[:, 0] == 1).all()):
            return of_images(pixel_values, image_grid_thw, **options)
        sizes = image_grid_thw.prod(-1).tolist()
        chunks = zip(pixel_values.split(sizes), image_grid_thw.split(1), strict=True)
        means = [inner.vision_tower(chunk, grid_thw=grid).pooler_output for chunk, grid in chunks]
        return SimpleNamespace(pooler_output=[inner.mm_projector(mean).squeeze(1) for mean in means])

    inner.get_image_features = get_features  # `get_video_features` calls it


@dataclass(frozen=True)
class Bounds:
    """Shrinks an image to at most so many patches, in total and on each side, and pads it to whole features."""

    most: int  # patches
    most_of_side: int
    patch: int
    factor: int  # side of a feature in pixels

    def shrunk(self, size: Size) -> Size:
        longest = self.most_of_side * self.patch
        count = math.prod(max(1, side // self.patch) for side in size)
        scale = min(1.0, math.sqrt(self.most / count), *(longest / side for side in size))
        height, width = (min(max(1, int(side * scale)), longest) for side in size)
        return height, width

    def padded(self, size: Size) -> Size:
        height, width = (-(-side // self.factor) * self.factor for side in self.shrunk(size))
        return height, width


@dataclass(frozen=True, kw_only=True)
class Padded(Processor):
    """Shrinks and pads an image."""

    bounds: Bounds

    def layout(self, height: int, width: int, *, images: int = 1) -> Layout:
        tile = self._tile(*self.bounds.padded((height, width)))
        return Layout((height, width), (tile,), (0, 0), self._one_run(tokens_per_grid(tile.grid, self.projector)))

    def views(self, pixels: Pixels, *, images: int = 1) -> list[Pixels]:
        size = pixels.shape[:2]
        resized = self._resize(pixels, *self.bounds.shrunk(size))
        return [pasted(resized, self.bounds.padded(size), at=(0, 0))]


@dataclass(frozen=True, kw_only=True)
class Chunks(VideoProcessor):
    """Shrinks and pads frames like images, of which up to `chunk` are a chunk, and writes the time before each chunk.

    Features take the places of image tokens, as in published processors: the video token of Transformers is none of
    the vocabulary. A token budget reduces the frames.
    """

    bounds: Bounds
    chunk: int

    def numbers(self, clip: Clip, budget: Budget) -> tuple[int, ...]:
        if budget.max_tokens is not None:
            tokens = self._tokens(self._tile(*self.bounds.padded((clip.height, clip.width))))
            most = self.chunk * max(budget.max_tokens // tokens, 1)
            budget = replace(budget, max_frames=min(budget.max_frames, most))
        return taken(clip, budget, first_of_parts)

    def frame_size(self, size: Size, frames: int, budget: Budget) -> Size:
        return self.bounds.padded(size)

    def most_groups(self, tokens: int) -> int:
        return self.chunk * tokens  # `numbers` knows the clip's size

    def tiles(self, group: tuple[Tile, ...], frames: int) -> tuple[Tile, ...]:
        (tile,), counts = group, chunk_lengths(frames, self.chunk)
        return tuple(replace(tile, grid=(*tile.grid, count)) if count > 1 else tile for count in counts)

    def resized(self, pixels: Pixels, grid: tuple[int, int]) -> Pixels:
        size = pixels.shape[:2]
        resized = resize_as_torchvision(pixels, *self.bounds.shrunk(size), self.resample)
        return pasted(resized, self.bounds.padded(size), at=(0, 0))

    def prompt(self, clip: Clip, numbers: tuple[int, ...], tokens: int) -> Prompt:
        times = [clip.seconds(number) for number in numbers[:: self.chunk]]
        marks = [f"{strftime('%H:%M:%S', gmtime(time))}.{int(time % 1 * 1000):03d}{START}" for time in times]
        texts = (marks[0], *(END + mark for mark in marks[1:]), END + "\n")  # as templates end an image
        return Prompt(self.text, texts, (tokens,) * len(times))


def build_processor(options: Json, model: ModelConfig, shared: dict[str, Any]) -> Processor:
    """Return the image processor. Raises UserError for a patch or merge size other than the model's."""
    options = _unnested(options, {"in_patch_limit": "max_patches"})
    return Padded(**_fields(options, model, shared), placeholder=IMAGE, image_token=IMAGE)


def build_video(options: Json, model: ModelConfig, shared: dict[str, Any]) -> VideoProcessor | None:
    """Return the video processor; None for a tower without positions to which times are added."""
    if model.vision.position_embedding != "learned_rope2d":
        return None
    names = {"in_patch_limit_each_frame": "max_patches", "temporal_merge_kernel_size": "temporal_patch_size"}
    options = _unnested(options, {**names, "sample_fps": "fps", "max_num_frames_each_video": "max_frames"})
    limits = {name: options[name] for name in ("fps", "max_frames") if name in options}
    fields = {**_fields(options, model, shared), "usual": replace(shared["usual"], **limits)}
    return Chunks(**fields, chunk=options["temporal_patch_size"], text=IMAGE, as_text=True)


def _unnested(options: Json, names: dict[str, str]) -> Json:
    """Return all options by their names in Transformers, `names` among them.

    Published folders have them in `media_proc_cfg`. Raises UserError for options that are not supported.
    """
    names = {**names, "merge_kernel_size": "merge_size"}
    nested = options.get("media_proc_cfg", {}).items()
    given = {names.get(name, name): value for name, value in nested if value is not None}
    check(given, {**OPTIONS, **_RANGES}, "preprocessor_config.json: media_proc_cfg")
    return {**options, **given}


def _fields(options: Json, model: ModelConfig, shared: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of both processors. Raises UserError for sizes other than the model's."""
    for name, known in (("fixed_output_tokens", ""), ("in_patch_limit_video", ""), ("timestamp_mode", "hh:mm:ss.fff")):
        if options.get(name, known) != known:
            raise UserError(f"{name} in preprocessor_config.json is not supported: remove it")
    patch, merge = model.vision.patch_size, model.projector.pixel_shuffle
    require_model_value(options, "patch_size", patch)
    require_model_value(options, "merge_size", merge)
    if not has_only(options["size"], "max_height", "max_width") or len({*options["size"].values()}) > 1:
        raise UserError("size in preprocessor_config.json must give max_height and max_width, equal numbers of patches")
    most_of_side = options.get("patch_limit_on_one_side", options["size"]["max_height"])
    bounds = Bounds(options["max_patches"], most_of_side, patch, patch * merge)
    pixels = {"mean": tuple(options["image_mean"]), "std": tuple(options["image_std"])}
    return {**shared, **pixels, "bounds": bounds}


_RANGES = {
    "max_patches": whole(1, 2**20),
    "patch_limit_on_one_side": whole(1, 2**14),
    "media_proc_cfg": OBJECT,
    "temporal_patch_size": whole(1, _CHUNK),
}
_DEFAULTS = {**HALF_PIXELS, "size": {"max_height": 512, "max_width": 512}, "patch_size": 14, "merge_size": 2}
FAMILY = Family(
    name="kimi_k25",
    model_types=("kimi_k25",),
    config=config,
    table=table,
    inputs=inputs,
    name_prefixes=(PUBLISHED, SAVED, LOADED),
    image_processors=(
        ProcessorReader(
            ("Kimi_K25", "KimiK25VisionProcessor"),
            {**_DEFAULTS, "max_patches": 16384},
            build_processor,
            ranges=_RANGES,
        ),
    ),
    videos=VideoReader(
        ("Kimi_K25",),
        ("kimi_k25",),
        {**_DEFAULTS, "max_patches": 4096, "temporal_patch_size": _CHUNK},
        Budget(min_frames=1),
        build_video,
        ranges=_RANGES,
    ),
    image_text=IMAGE,
    chat_template=template("kimi", "<|im_user|> <|im_middle|> <|im_end|>"),
    complete=complete,
    not_in_peft=("gate_proj", "up_proj", "down_proj"),
)
