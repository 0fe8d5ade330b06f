"""Qwen3-Omni's thinker: Qwen3-VL's tower, Qwen3-MoE with interleaved M-RoPE, and an audio encoder whose features are
merged at audio tokens.

Three convolutions over time and frequencies make 13 features of a second of sound, each with a position as a token of
text has; frames of videos are as many steps apart. The speaking parts (`talker`, `code2wav`) are not trained, and are
exported unchanged.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from megavlm.arch.layers import AUDIO_EMBED, AUDIO_PROJECTOR
from megavlm.config.schema import ModelConfig
from megavlm.families import qwen2_5_omni, qwen3_vl
from megavlm.families.shared import qwen_vl
from megavlm.families.shared.experts import qwen_experts
from megavlm.families.shared.family import NamePrefixes
from megavlm.families.shared.qwen_vl import with_defaults
from megavlm.families.shared.settings import Settings
from megavlm.families.shared.table import Table, linear, module
from megavlm.families.shared.videos import VIDEOS
from megavlm.inputs.bad_sample import BadSample, Reason
from megavlm.inputs.layout import Layout
from megavlm.inputs.processor import Processor
from megavlm.inputs.reader import Json
from megavlm.inputs.sounds import RATE
from megavlm.inputs.video import Budget, Clip

_TYPES = ("qwen3_omni_moe_thinker", "qwen3_omni_moe")
_CHUNK = 50  # twice as many frames make 13 features, a number that Transformers has in its code
_MARKS = {"text": "<|audio_pad|>", "start": "<|audio_start|>", "end": "<|audio_end|>"}
_VIDEO_SIZE = {"shortest_edge": 128 * 32**2, "longest_edge": 768 * 32**2}
_TEXT: dict[str, Any] = {
    "vocab_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "rope_theta": 1e6,
}
_AUDIO: dict[str, Any] = {
    **qwen2_5_omni.AUDIO_DEFAULTS,
    "n_window": _CHUNK,
    "n_window_infer": 800,
    "downsample_hidden_size": 480,
}


def config(settings: Settings) -> ModelConfig:
    """Return the `ModelConfig` of a Qwen3OmniMoeThinkerConfig, or of the thinker in a Qwen3OmniMoeConfig."""
    thinker = qwen2_5_omni.thinker_of(settings)
    text = with_defaults(thinker.section("text_config"), _TEXT)
    model = qwen3_vl.whole_model(thinker, text, kind="qwen3_moe")
    sounds = with_defaults(thinker.section("audio_config"), _AUDIO)
    sounds.require("n_window", _CHUNK, why=f"Transformers counts the features of chunks of {2 * _CHUNK} frames alone")
    audio = replace(
        qwen2_5_omni.audio_encoder(sounds, model.language.hidden_size),
        conv_channels=sounds.need("downsample_hidden_size"),
        window_chunks=max(1, sounds.need("n_window_infer") // (2 * _CHUNK)),
    )
    normalized = text.get("norm_topk_prob", True)
    return replace(
        model,
        experts=qwen_experts(text, layers=model.language.num_layers, normalized=normalized),
        audio=audio,
        audio_token=thinker.get("audio_token_id", 151646),
        video_steps_per_second=thinker.get("position_id_per_seconds", 25),
    )


def table(model: ModelConfig, prefixes: NamePrefixes) -> Table:
    """Return Qwen3-VL's table with other names of mergers, and that of the audio encoder."""
    names = qwen3_vl.table(model, prefixes, mergers="merger_list", parts=("ln_q", "mlp.0", "mlp.2"))
    prefix = qwen2_5_omni.audio_prefix(prefixes)
    for number in (1, 2, 3):
        names |= module(f"{AUDIO_EMBED}.conv{number}", f"{prefix}conv2d{number}", "weight", "bias")
    return {
        **names,
        **qwen2_5_omni.audio_layers(model, prefix),
        **linear(f"{AUDIO_EMBED}.linear", f"{prefix}conv_out", bias=False),
        **linear(f"{AUDIO_PROJECTOR}.inner", f"{prefix}proj1", bias=True),
        **linear(f"{AUDIO_PROJECTOR}.linear", f"{prefix}proj2", bias=True),
    }


@dataclass(frozen=True, kw_only=True)
class _WholeSteps(qwen2_5_omni.OmniVideo):
    """Videos whose groups of frames are a whole number of M-RoPE steps apart: Transformers keeps fractions."""

    def layout(self, clip: Clip, budget: Budget) -> Layout:
        rate = budget.rate_of_images
        if self.frames_per_patch * (self.steps_per_second or 0) / rate % 1:
            message = f"times of {rate:g} frames a second are no whole M-RoPE steps: use 1 or 2 (--video-fps)"
            raise BadSample(Reason.UNSUPPORTED, message)
        return super().layout(clip, budget)


def build_video(options: Json, model: ModelConfig, shared: dict[str, Any]) -> _WholeSteps:
    """Return the video processor."""
    return _WholeSteps(**shared, **qwen2_5_omni.video_fields(options, model, size=_VIDEO_SIZE))


def build_processor(options: Json, model: ModelConfig, shared: dict[str, Any]) -> Processor:
    """Return the image processor, with that of sounds, of which at most the first hour is read, in one piece."""
    built: Any = qwen_vl.build_processor(options, model, shared)
    return replace(built, sounds=qwen2_5_omni.build_sounds(options, model, longest=3600 * RATE, padded=False, **_MARKS))


_HELD, *_SAVED = qwen2_5_omni.FAMILY.name_prefixes
FAMILY = replace(
    qwen2_5_omni.FAMILY,
    name="qwen3_omni_moe",
    model_types=_TYPES,
    config=config,
    table=table,
    image_processors=(
        replace(qwen_vl.PROCESSOR, model_types=_TYPES, build=build_processor, ranges=qwen2_5_omni.RANGES),
    ),
    videos=replace(VIDEOS, classes=(), model_types=_TYPES, build=build_video),
    image_text=qwen_vl.IMAGE,
    unused=(r"talker\..*", r"code2wav\..*"),
    not_in_peft=("gate_proj", "up_proj", "down_proj"),
    name_prefixes=(replace(_HELD, experts="stacked"), *_SAVED),
    runs="Qwen3OmniMoeThinkerForConditionalGeneration",
)
