"""GLM-4.1V and GLM-4.6V-Flash: a ViT with a norm before its positions, a gated merger, and GLM-4 with M-RoPE.

GLM-4.5V and GLM-4.6V have the same tower and merger, and GLM-4.5 as language model: a mixture of experts in which half
of each head's channels have rotary embeddings, in Llama's order (not interleaved). Experts are scored by sigmoids; a
bias that is not trained by gradients is added to the scores when a token's experts are selected. One expert is shared
by all tokens. The first layers are dense. A layer after the last one predicts a further token; files repeat the
embedding and the output weight for it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from megavlm.arch.layers import LANGUAGE_LAYER, VISION_NORM
from megavlm.config.schema import LanguageConfig, ModelConfig, ProjectorConfig, VisionConfig
from megavlm.families.shared.chat import template
from megavlm.families.shared.experts import glm_experts
from megavlm.families.shared.family import Family, NamePrefixes, Predictors
from megavlm.families.shared.language import is_tied, language_table, partly_turning, predictor_table
from megavlm.families.shared.qwen_vl import (
    PREFIXES,
    NativeResolution,
    attention_table,
    inputs,
    native_bounds,
    patch_embed_table,
    text_model,
    vision_sizes,
    with_defaults,
)
from megavlm.families.shared.settings import Settings, refuse
from megavlm.families.shared.table import Rename, Table, gated, linear
from megavlm.families.shared.videos import TimedPairs, qwen_fields
from megavlm.families.shared.vision import blocks
from megavlm.inputs.layout import Prompt
from megavlm.inputs.processor import Processor
from megavlm.inputs.reader import CLIP_PIXELS, Json, ProcessorReader, VideoReader, class_of, video_class_of
from megavlm.inputs.resize import Size, at_least, smart_resize
from megavlm.inputs.video import Budget, Clip, VideoProcessor, shown_at

IMAGE, START, END = "<|image|>", "<|begin_of_image|>", "<|end_of_image|>"
VIDEO_START, VIDEO_END = "<|begin_of_video|>", "<|end_of_video|>"
_LONGEST, _MOST = 2400, 640  # seconds of a clip that GLM-4.6V counts, and frames that it sees
# Defaults of the configuration classes that differ from those of Qwen2 and Llama, used to read the text sections.
_TEXT: dict[str, Any] = {
    "vocab_size": 151552,
    "intermediate_size": 13696,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
}
_MOE_TEXT: dict[str, Any] = {
    "vocab_size": 151424,
    "intermediate_size": 10944,
    "num_hidden_layers": 46,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "max_position_embeddings": 65536,
    "rms_norm_eps": 1e-5,
}
_VISION: dict[str, Any] = {
    "depth": 24,
    "hidden_size": 1536,
    "intermediate_size": 13696,
    "out_hidden_size": 4096,
    "num_heads": 12,
    "rms_norm_eps": 1e-5,
}


def config(settings: Settings) -> ModelConfig:
    """Return the `ModelConfig` of a Glm4vConfig or Glm46VConfig."""
    text = with_defaults(settings.section("text_config"), _TEXT)
    tied = is_tied(settings, text)
    return _model(settings, language(_unbiased(text), kind="qwen2", tied=tied), image_token=151343)


def moe_config(settings: Settings) -> ModelConfig:
    """Return the `ModelConfig` of a Glm4vMoeConfig."""
    text = with_defaults(settings.section("text_config"), _MOE_TEXT)
    text_model = _moe_language(text, tied=is_tied(settings, text))
    model = _model(settings, text_model, image_token=151363)
    return replace(model, experts=glm_experts(text, layers=text_model.num_layers))


def _moe_language(text: Settings, *, tied: bool) -> LanguageConfig:
    """Return the language model of a Glm4vMoeTextConfig."""
    found = text_model(_unbiased(text), kind="llama", tied=tied, section=(8, 12, 12), interleaved=False)
    return partly_turning(replace(found, add_qkv_bias=text.get("attention_bias", True)), text, 0.5)


def _unbiased(text: Settings) -> Settings:
    """Return a text section without `attention_bias`, which applies to q, k and v, not to the output."""
    return Settings({name: value for name, value in text.values.items() if name != "attention_bias"}, text.where)


def _model(settings: Settings, text: LanguageConfig, *, image_token: int) -> ModelConfig:
    """Return the `ModelConfig` with this language model; `image_token` is the default of the configuration class."""
    tower = with_defaults(settings.section("vision_config"), _VISION)
    return ModelConfig(
        vision=_vision(tower),
        projector=merger(tower, text, inner=tower.need("intermediate_size")),
        language=text,
        image_token=settings.get("image_token_id", image_token),
    )


def merger(tower: Settings, text: LanguageConfig, *, inner: int) -> ProjectorConfig:
    """Return the merger: a convolution to the text's width, then a gated MLP with an inner width of `inner`."""
    if tower.need("out_hidden_size") != text.hidden_size:
        refuse(tower, "out_hidden_size", f"features must be as wide as the language model, {text.hidden_size}")
    return ProjectorConfig(
        kind="gated",
        hidden_size=inner,
        pixel_shuffle=tower.get("spatial_merge_size", 2),
        merge="convolution",
        merge_channels=text.hidden_size,
        merge_bias=True,
        bias=False,
    )


def language(text: Settings, *, kind: str, tied: bool) -> LanguageConfig:
    """Return the language model of a Glm4vTextConfig: one of type `kind` with norms after attention and MLP.

    Rotary embeddings are interleaved, and may apply to a part of each head.
    """
    found = text_model(text, kind=kind, tied=tied, section=(8, 12, 12), interleaved=False)
    return partly_turning(replace(found, post_norms=True, rotary_interleaved=True), text, 1.0)


def vision(tower: Settings, **options: Any) -> VisionConfig:
    """Return a vision tower with RMSNorm, SwiGLU and the given options."""
    tower.require("hidden_act", "silu", why="only SwiGLU is known here")
    found = {**vision_sizes(tower), "norm_epsilon": tower.need("rms_norm_eps"), **options}
    image_size = tower.square("image_size", 336) // found["patch_size"] * found["patch_size"]
    return VisionConfig(**found, image_size=image_size, normalization="RMSNorm", activation="swiglu")


def _vision(tower: Settings) -> VisionConfig:
    """Return the vision tower of a Glm4vVisionConfig. The MLP of its layers is `out_hidden_size` wide."""
    return vision(
        tower,
        ffn_hidden_size=tower.need("out_hidden_size"),
        position_embedding="learned_rope2d",
        add_bias_linear=False,
        add_qkv_bias=tower.get("attention_bias", False),
        pre_norm=True,
        norm_before_position=True,
    )


def table(model: ModelConfig, prefixes: NamePrefixes) -> Table:
    return {
        **_vision_table(model.vision, prefixes.vision),
        **merger_table(model, prefixes),
        **text_table(model, prefixes),
    }


def merger_table(model: ModelConfig, prefixes: NamePrefixes) -> Table:
    """Return the table of the merger."""
    projector = {
        "projector.linear_in": "proj",
        "projector.linear_gate": "gate_proj",
        "projector.linear_fc1": "up_proj",
        "projector.linear_fc2": "down_proj",
    }
    side, width = model.projector.pixel_shuffle, model.vision.hidden_size
    kernel, visual = (model.language.hidden_size, width, side, side), prefixes.vision
    names = {name: linear(name, f"{visual}merger.{hf_name}", bias=False) for name, hf_name in projector.items()}
    return {
        "projector.convolution.weight": Rename(f"{visual}downsample.weight", view=kernel),
        "projector.convolution.bias": Rename(f"{visual}downsample.bias"),
        **{name: rule for each in names.values() for name, rule in each.items()},
        **linear("projector.inner_norm", f"{visual}merger.post_projection_norm", bias=True),
    }


def moe_table(model: ModelConfig, prefixes: NamePrefixes) -> Table:
    """Return the table of GLM-4.5V, with its experts and the layers that predict further tokens."""
    names = {
        **_vision_table(model.vision, prefixes.vision),
        **merger_table(model, prefixes),
        **language_table(model, prefixes),
    }
    for depth in range(model.language.mtp_layers):
        layer = f"{prefixes.language}layers.{model.language.num_layers + depth}."
        ends = (f"{layer}enorm", f"{layer}hnorm", f"{layer}eh_proj", f"{layer}shared_head.norm")
        names |= predictor_table(model, depth, ends, hf_layer=layer, stored=prefixes.experts)
    return names


def _repeated(model: ModelConfig, prefixes: NamePrefixes) -> dict[str, str]:
    """Return the names of copies of the embedding and output weight in layers that predict further tokens.

    Each copy is mapped to the name of the original.
    """
    first, embedding = model.language.num_layers, f"{prefixes.language}embed_tokens.weight"
    head = embedding if model.language.tie_embeddings else prefixes.head
    layers = [f"{prefixes.language}layers.{first + depth}." for depth in range(model.language.mtp_layers)]
    copies = {f"{layer}embed_tokens.weight": embedding for layer in layers}
    return copies | {f"{layer}shared_head.head.weight": head for layer in layers}


def _vision_table(vision: VisionConfig, prefix: str) -> Table:
    names = patch_embed_table(vision, prefix)
    names["patch_embed.position"] = Rename(f"{prefix}embeddings.position_embedding.weight")
    names |= linear("patch_embed.norm", f"{prefix}post_conv_layernorm", bias=False)
    for layer, hf_layer in blocks(vision, f"{prefix}blocks."):
        names |= attention_table(vision, layer, hf_layer) | gated(f"{layer}mlp", f"{hf_layer}mlp", bias=False)
    return names | linear(VISION_NORM, f"{prefix}post_layernorm", bias=False)


def text_table(model: ModelConfig, prefixes: NamePrefixes) -> Table:
    """Return the table of the GLM-4 language model, whose norms and gated MLPs have names of their own."""
    names = language_table(model, prefixes)
    for number in range(model.language.num_layers):
        layer, hf_layer = f"{LANGUAGE_LAYER}{number}.", f"{prefixes.language}layers.{number}."
        names |= linear(f"{layer}self_attn_bda.norm", f"{hf_layer}post_self_attn_layernorm", bias=False)
        names |= linear(f"{layer}pre_mlp_layernorm", f"{hf_layer}post_attention_layernorm", bias=False)
        names |= linear(f"{layer}mlp_bda.norm", f"{hf_layer}post_mlp_layernorm", bias=False)
        names |= linear(f"{layer}mlp.linear_fc1", f"{hf_layer}mlp.gate_up_proj", bias=False)
    return names


@dataclass(frozen=True, kw_only=True)
class GlmResolution(NativeResolution):
    """Counts an image's pixels once per frame of a patch, and first enlarges an image narrower than a feature."""

    frames: int
    start: str = START
    end: str = END

    def _resized(self, size: Size) -> Size:
        factor = self.patch_size * self.projector.pixel_shuffle
        bounds = {"min_pixels": self.min_pixels, "max_pixels": self.max_pixels}
        return smart_resize(at_least(size, factor), factor=factor, frames=self.frames, span=self.frames, **bounds)


def processor(options: Json, model: ModelConfig, shared: dict[str, Any]) -> Processor:
    """Return the image processor. The file's pixel bounds apply to all frames of a patch together."""
    own: dict[str, Any] = {"placeholder": f"{START}{IMAGE}{END}", "image_token": IMAGE}
    return GlmResolution(**shared, **own, **native_bounds(options, model), frames=model.vision.temporal_patch_size)


@dataclass(frozen=True, kw_only=True)
class GlmVideo(TimedPairs):
    """Writes the time in seconds of each pair's first frame after the pair. Pairs use the image token."""

    text: str = IMAGE
    start: str = START
    end: str = END
    longest: float  # seconds; a longer clip gives no more frames than one of this length

    def numbers(self, clip: Clip, budget: Budget) -> tuple[int, ...]:
        """Return the numbers of frames at intervals of 1/fps seconds.

        A clip that is longer than `longest` or gives more frames than the budget allows is sampled evenly, with as
        many frames as are allowed.
        """
        count, seconds = len(clip.times), len(clip.times) / clip.rate
        wanted = max(seconds * budget.fps, budget.min_frames)
        most = int(min(budget.max_frames, self.longest * budget.fps))
        if seconds <= self.longest and wanted < budget.max_frames + 1:
            places = [number * clip.rate / budget.fps for number in range(int(wanted))]
        else:
            places = [float(place) for place in np.linspace(0, seconds, most) * clip.rate]
        if most >= count and wanted >= count:
            return tuple(range(count))
        return shown_at(clip, [min(count - 1, math.ceil(place)) for place in places])

    def size_of(self, size: Size, frames: int, *, most: int | None) -> Size:
        return super().size_of(size, self.groups(frames) * self.frames_per_patch, most=most)

    def prompt(self, clip: Clip, numbers: tuple[int, ...], tokens: int) -> Prompt:
        times = [self._written(clip.seconds(number)) for number in numbers[:: self.frames_per_patch]]
        between = (f"{self.end}{time}{self.start}" for time in times[:-1])
        texts = (VIDEO_START + self.start, *between, f"{self.end}{times[-1]}{VIDEO_END}")
        return Prompt(self.text, texts, (tokens,) * len(times))

    def _written(self, seconds: float) -> str:
        return str(int(seconds))


@dataclass(frozen=True, kw_only=True)
class Glm46Video(GlmVideo):
    """GLM-4.6V's videos: times have a decimal and a unit, and a long clip gives fewer frames of each second."""

    def numbers(self, clip: Clip, budget: Budget) -> tuple[int, ...]:
        """Return the numbers of frames at a rate that follows from the clip's length, if the budget has none."""
        if math.isfinite(budget.fps):
            return super().numbers(clip, budget)
        count, seconds = len(clip.times), len(clip.times) / clip.rate
        rate = self.frames_per_patch * (3 if seconds <= 30 else 1 if seconds <= 300 else 0.5)
        most = max(1, min(int(min(seconds, _LONGEST) * rate), budget.max_frames))
        found, moment = list[int](), 0.0
        for number in range(count):
            if number * (1 / clip.rate) >= moment:
                found.append(number)
                moment += 1 / rate
                if moment >= int(seconds):  # of the last second, no frame is sampled: as in the reference
                    break
        last = found[-1] if len(found) < most <= count else count - 1
        places = found if len(found) == most else np.linspace(0, last, most, dtype=int).tolist()
        return shown_at(clip, places)

    def _written(self, seconds: float) -> str:
        return f"{seconds:.1f} seconds"


def build_video(options: Json, model: ModelConfig, shared: dict[str, Any]) -> VideoProcessor:
    """Return the video processor. GLM-4.6V has the model types of GLM-4.1V and GLM-4.5V, and classes of its own."""
    longer = "Glm46V" in (video_class_of(options), class_of(options)[0])
    # Transformers' processors have `num_frames` and do not use it, and that of GLM-4.6V does not use `fps` either.
    fps, most = (math.inf, _MOST) if longer else (options["fps"], Budget().max_frames)
    usual = replace(shared["usual"], fps=fps, max_frames=most)
    fields = {**shared, **qwen_fields(options, model), "usual": usual}
    return (Glm46Video if longer else GlmVideo)(**fields, longest=options["max_duration"])


FAMILY = Family(
    name="glm4v",
    model_types=("glm4v", "glm46v"),
    config=config,
    table=table,
    inputs=inputs,
    name_prefixes=PREFIXES,
    image_processors=(
        ProcessorReader(
            ("Glm4v", "Glm46V"),
            {**CLIP_PIXELS, "size": {"shortest_edge": 112**2, "longest_edge": 28**2 * 15000}},
            processor,
        ),
    ),
    videos=VideoReader(
        ("Glm4v", "Glm46V"),
        ("glm4v", "glm46v", "glm4v_moe", "glm_ocr"),
        {
            **CLIP_PIXELS,
            "size": {"shortest_edge": 112**2, "longest_edge": 28**2 * 60000},
            "temporal_patch_size": 2,
            "fps": 2.0,
            "max_duration": 300,
        },
        Budget(min_frames=1),
        build_video,
    ),
    image_text=IMAGE,
    chat_template=template("glm4v", "[gMASK] <sop> <|user|> <|assistant|>"),
)

MOE = replace(
    FAMILY,
    name="glm4v_moe",
    model_types=("glm4v_moe",),
    config=moe_config,
    table=moe_table,
    not_in_peft=("gate_proj", "up_proj", "down_proj"),
    predictors=Predictors(r"model\.(language_model\.)?layers\.(46|92)\..*", copies=_repeated),
)
