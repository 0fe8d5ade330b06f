"""Muse-Glimmer: a windowed tower with learned and rotary positions, a deep MLP, and a gated language model, with video.

Embeddings, features, queries and keys are normalised without weights; a gate multiplies attention's output. Three of
four language layers have a sliding window and rotary embeddings; the others attend to all tokens without them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from megavlm.arch.layers import LANGUAGE_LAYER, VISION_NORM
from megavlm.config.schema import LanguageConfig, ModelConfig, ProjectorConfig, VisionConfig
from megavlm.errors import UserError
from megavlm.families import kimi_k25
from megavlm.families.gemma4 import Budgeted, BudgetedFrames
from megavlm.families.shared.chat import template
from megavlm.families.shared.family import Family, NamePrefixes
from megavlm.families.shared.inputs import Batch, Given
from megavlm.families.shared.language import language, language_table, types_of_layers
from megavlm.families.shared.qwen_vl import of_kinds, with_defaults
from megavlm.families.shared.settings import Settings, refuse
from megavlm.families.shared.table import QKV, ChannelsLast, Rename, Table, linear
from megavlm.families.shared.vision import blocks, mlp, norms, qkv
from megavlm.inputs.layout import Prompt
from megavlm.inputs.processor import Processor
from megavlm.inputs.reader import HALF_PIXELS, Json, ProcessorReader, VideoReader, require_model_value
from megavlm.inputs.resize import Size
from megavlm.inputs.video import Budget, Clip, VideoProcessor, taken

IMAGE, VIDEO = "<|patch|>", "<|video|>"
_SECONDS = "Time: {timestamp:.1f}s"
_TEXT: dict[str, Any] = {
    **{"vocab_size": 202048, "hidden_size": 6656, "intermediate_size": 19968, "num_hidden_layers": 52},
    **{"num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 131072},
    "rms_norm_eps": 1e-5,
}
_VISION: dict[str, Any] = {
    **{"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 50, "num_attention_heads": 16},
    **{"pos_emb_height": 32, "pos_emb_width": 32, "hidden_act": "gelu"},
}


def config(settings: Settings) -> ModelConfig:
    """Return the `ModelConfig` of a MuseGlimmerConfig."""
    tower = settings.section("vision_config")
    vision, side = _vision(tower), tower.get("merge_size", 2)
    inputs = vision.hidden_size * side**2
    settings.require("out_hidden_size", inputs, why=f"the projector reads {side}×{side} patches, {inputs} channels")
    settings.require("projector_hidden_act", "gelu", why="only GELU projectors are known here")
    return ModelConfig(
        vision=vision,
        projector=ProjectorConfig(
            kind="deep_mlp",
            hidden_size=settings.get("projector_hidden_size", 4096),
            pixel_shuffle=side,
            bias=False,
        ),
        language=_language(settings.section("text_config"), tied=settings.get("tie_word_embeddings", False)),
        image_token=settings.get("image_token_id", 200092),
        video_token=settings.get("video_token_id", 200091),
    )


def _vision(tower: Settings) -> VisionConfig:
    """Return the vision tower of a MuseGlimmerVisionConfig. A window is as large as the table of positions."""
    tower.require("layer_norm_eps", 1e-5, why="norms in the layers have 1e-5 in any case")
    vision = kimi_k25.moonvit(with_defaults(tower, _VISION))
    usual = ["full_attention" if layer % 4 == 3 else "window_attention" for layer in range(vision.num_layers - 1)]
    return replace(
        vision,
        rotary_neighbours=False,
        temporal_patch_size=tower.get("patch_temporal", 2),
        position_interpolation="bilinear_zeros",
        patch_bias=False,
        pre_norm=True,
        window_size=vision.image_size,
        full_attention_layers=types_of_layers(tower, [*usual, "full_attention"], "full_attention", "window_attention"),
    )


def _language(text: Settings, *, tied: bool) -> LanguageConfig:
    """Return the language model of a MuseGlimmerTextConfig. A layer whose layer_rope_theta is 0 does not rotate; others
    rotate with rope_theta, whatever theirs is, as in Transformers.
    """
    text.require("hidden_activation", "silu", why="only SwiGLU language models are known here")
    if text.values.get("sliding_window", 2048) is None:
        refuse(text, "sliding_window", "layers with a window need a number of tokens")
    base = language(with_defaults(text, _TEXT), kind="qwen3", tied=tied)
    usual = ["sliding_attention"] * base.num_layers
    usual[::-4] = ["full_attention"] * len(usual[::-4])
    thetas = text.get("layer_rope_theta", [kind == "sliding_attention" for kind in usual])
    if len(thetas) != base.num_layers:
        refuse(text, "layer_rope_theta", "each layer needs a number")
    return replace(
        base,
        qk_norm_weights=False,
        softmax_scale=text.get("qk_scale_factor", 3.87) * (base.softmax_scale or 1 / math.sqrt(base.kv_channels)),
        post_norms=True,
        post_norm_epsilon=text.get("post_norm_eps", 1e-8),
        apply_layernorm_1p=True,
        final_norm_1p=False,
        embedding_norm=True,
        attention_output_gate=True,
        logit_scale=text.get("output_multiplier", 0.19611613513818404),
        final_softcap=text.get("final_logit_softcapping", 20.0),
        window_size=text.get("sliding_window", 2048),
        full_attention_layers=types_of_layers(text, usual, "full_attention", "sliding_attention"),
        no_rope_layers=tuple(number for number, theta in enumerate(thetas) if not theta),
    )


def table(model: ModelConfig, prefixes: NamePrefixes) -> Table:
    """Return the table of the model. In files, frames and merged patches are laid out in other orders, and the first
    quarter of the channels of a tower's head, and the third, rotate with the column.
    """
    vision, text, tower, top = model.vision, model.language, prefixes.vision, prefixes.projector
    quarter = vision.hidden_size // vision.num_attention_heads // 4
    order = tuple(quarter * (each ^ 1) + number for each in range(4) for number in range(quarter))
    embedder, pixels = f"{tower}patch_embedder.", vision.patch_size**2
    names: Table = {
        "patch_embed.proj.weight": ChannelsLast(f"{embedder}patch_embedding.weight", vision.in_channels, pixels),
        "patch_embed.position": Rename(f"{embedder}position_embedding_table.weight"),
        "projector.linear_in.weight": ChannelsLast(f"{top}vision_adapter.fc1.weight", model.projector.pixel_shuffle**2),
        **linear("patch_embed.norm", f"{tower}ln_pre", bias=True),
        **linear(VISION_NORM, f"{tower}ln_post", bias=True),
        **linear("projector.linear_fc1", f"{top}vision_adapter.fc2", bias=False),
        **linear("projector.linear_fc2", f"{top}vision_projection", bias=False),
        **language_table(model, prefixes),
    }
    for layer, stored in blocks(vision, f"{tower}layers."):
        attention = f"{layer}self_attention.linear_"
        names |= qkv(f"{attention}qkv", f"{stored}attn.{{}}_proj", vision, bias=True, order=order)
        names |= linear(f"{attention}proj", f"{stored}attn.proj", bias=True)
        names |= norms(vision, layer, f"{stored}norm1", f"{stored}norm2") | mlp(layer, stored)
    for number in range(text.num_layers):
        pattern = f"{prefixes.language}layers.{number}.self_attn.{{}}_proj.weight"
        fused = QKV(pattern, text.num_query_groups, text.kv_channels, gated=True)
        names[f"{LANGUAGE_LAYER}{number}.self_attention.linear_qkv.weight"] = fused
    return names


def inputs(batch: Batch, model: ModelConfig) -> Given:
    """Return tokens, and the patches of images and of videos, row-major and frame by frame."""
    if batch.images is None or not batch.image_sizes.grids:
        return {"input_ids": batch.text.tokens}
    vision = model.vision
    patches = batch.images.patches.unflatten(1, (vision.in_channels, -1, vision.patch_size**2))
    patches = patches.expand(-1, -1, vision.temporal_patch_size, -1).transpose(1, 2).flatten(1)
    return {"input_ids": batch.text.tokens, **of_kinds(batch, model, patches)[0]}


def nearest(size: Size, most: int, unit: int) -> Size:
    """Return the resized (height, width) of at most `most` features of `unit` pixels a side, if a side is longer than
    one: both sides are rounded up or down to whole features, whichever comes closest to the aspect ratio.

    Of equally close grids Transformers takes the first of a set of pairs, whose order depends on their hashes alone.
    """
    rows, columns = (side / unit for side in size)
    ratio = columns / rows
    if rows * columns > most:
        rows = (most / ratio) ** 0.5
        columns = rows * ratio
    around = {*product(*((math.floor(side), math.ceil(side)) for side in (rows, columns)))}
    grids = [grid for grid in around if min(grid) >= 1 and math.prod(grid) <= most]
    grids = grids or [(max(1, round(rows)), max(1, round(columns)))]
    high, wide = min(grids, key=lambda grid: abs(grid[0] / grid[1] - size[0] / size[1]))
    return high * unit, wide * unit


@dataclass(frozen=True, kw_only=True)
class Nearest(Budgeted):
    """Resizes an image to about its own size, or to at most `most` features, and marks both ends."""

    start: str = "<|image_start|>"
    end: str = "<|image_end|>"

    def _resized(self, size: Size) -> Size:
        return nearest(size, self.most, self.patch_size * self.projector.pixel_shuffle)


@dataclass(frozen=True, kw_only=True)
class TimedGroups(BudgetedFrames):
    """Resizes frames like images, to fewer features, and writes the time in seconds before each group of frames."""

    def numbers(self, clip: Clip, budget: Budget) -> tuple[int, ...]:
        return taken(clip, budget, _spread, multiple=self.frames_per_patch)

    def prompt(self, clip: Clip, numbers: tuple[int, ...], tokens: int) -> Prompt:
        times = [_SECONDS.format(timestamp=clip.seconds(number)) for number in numbers[:: self.frames_per_patch]]
        between = (f"<|vid_frame_separator|>{time}" for time in times[1:])
        texts = (f"<|vid_start|>{times[0]}", *between, "<|vid_end|>")
        return Prompt(self.text, texts, (tokens,) * len(times), self.number)

    def _fitted(self, size: Size, most: int, unit: int) -> Size:
        return nearest(size, most, unit)


def _spread(count: int, frames: int) -> list[int]:
    """Return `frames` evenly spaced frames of `count`, in fp32 and truncated like the reference."""
    import torch

    return [int(place) for place in torch.linspace(0, count - 1, frames).long().tolist()]


def build_processor(options: Json, model: ModelConfig, shared: dict[str, Any]) -> Processor:
    """Return the image processor. Raises UserError for a patch or merge size other than the model's."""
    most, positions = options["max_image_tokens"], model.vision.axis_positions
    return Nearest(**_fields(options, model, shared, most), positions=positions, placeholder=IMAGE, image_token=IMAGE)


def build_video(options: Json, model: ModelConfig, shared: dict[str, Any]) -> VideoProcessor | None:
    """Return the video processor; None for a model without a video token. `num_frames` bounds the frames of a clip."""
    if model.video_token is None:
        return None
    frames = model.vision.temporal_patch_size
    require_model_value(options, "temporal_patch_size", frames)
    if options.get("frame_timestamp_format", _SECONDS) != _SECONDS:
        raise UserError(f"frame_timestamp_format in video_preprocessor_config.json must be {_SECONDS!r}: correct it")
    fields = _fields(options, model, shared, options["max_video_frame_tokens"])
    fields |= {"usual": Budget(options["fps"], options["num_frames"], min_frames=frames), "frames_per_patch": frames}
    return TimedGroups(**fields, text=VIDEO, number=model.video_token)


def _fields(options: Json, model: ModelConfig, shared: dict[str, Any], most: int) -> dict[str, Any]:
    """Return the fields of both processors. Raises UserError if patches and features are not the model's."""
    require_model_value(options, "patch_size", model.vision.patch_size)
    require_model_value(options, "merge_size", model.projector.pixel_shuffle)
    return {**shared, "most": most}


_PIXELS: Json = {**HALF_PIXELS, "resample": 1, "patch_size": 14, "merge_size": 2}
FAMILY = Family(
    name="muse_glimmer",
    model_types=("muse_glimmer",),
    config=config,
    table=table,
    inputs=inputs,
    name_prefixes=(NamePrefixes("model.vision_tower.", "model.", "model.language_model."),),
    image_processors=(ProcessorReader(("MuseGlimmer",), {**_PIXELS, "max_image_tokens": 4096}, build_processor),),
    videos=VideoReader(
        ("MuseGlimmer",),
        ("muse_glimmer",),
        {**_PIXELS, "max_video_frame_tokens": 144, "fps": 2.0, "num_frames": 96},
        Budget(),
        build_video,
    ),
    image_text=IMAGE,
    chat_template=template("muse", "<|start|> <|message|> <|eot|>"),
)
