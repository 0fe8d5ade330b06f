"""Qwen2.5-Omni's thinker: Qwen2.5-VL, and a Whisper encoder whose features are merged at audio tokens.

A feature of a sound has a position as a token of text has, 25 a second; frames of videos are as many steps apart, and
the sound of a video takes turns with them. The speaking parts (`talker`, `token2wav`) are not trained, and are exported
unchanged.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from megavlm.arch.layers import AUDIO_EMBED, AUDIO_LAYER, AUDIO_PROJECTOR, VISION_LAYER
from megavlm.config.derived import audio_tower
from megavlm.config.schema import AudioConfig, ModelConfig
from megavlm.families import qwen2_vl
from megavlm.families.shared import qwen_vl
from megavlm.families.shared.chat import CHATML
from megavlm.families.shared.family import Family, NamePrefixes
from megavlm.families.shared.inputs import Batch, Given
from megavlm.families.shared.qwen_vl import with_defaults
from megavlm.families.shared.settings import Settings, refuse
from megavlm.families.shared.table import QKV, Table, linear, module
from megavlm.families.shared.videos import VIDEOS, QwenVideo, moments_of, qwen_fields
from megavlm.families.shared.vision import qkv
from megavlm.inputs.layout import Layout
from megavlm.inputs.processor import Processor
from megavlm.inputs.reader import Json, require_model_value
from megavlm.inputs.sounds import RATE, SoundProcessor
from megavlm.inputs.video import Budget, Clip
from megavlm.json_files import number, whole

IMAGE, VIDEO, AUDIO = "<|IMAGE|>", "<|VIDEO|>", "<|AUDIO|>"
_TURN = 2  # seconds of a video, then of its sound
RANGES = {
    **dict.fromkeys(("chunk_length", "feature_size", "sampling_rate", "hop_length", "n_fft"), whole(1, 2**20)),
    **dict.fromkeys(("dither", "padding_value"), number(-1, 1)),
}
_SOUNDS = {"sampling_rate": RATE, "hop_length": 160, "n_fft": 400, "dither": 0.0, "padding_value": 0.0}
_MARKS = {"start": "<|vision_bos|>", "end": "<|vision_eos|>"}
_TYPES = ("qwen2_5_omni_thinker", "qwen2_5_omni")
_TOP = {"image_token_id": 151655, "video_token_id": 151656, "position_id_per_seconds": 25, "audio_token_id": 151646}
_TEXT: dict[str, Any] = {
    "vocab_size": 152064,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "rope_theta": 1e6,
}
AUDIO_DEFAULTS: dict[str, Any] = {
    "num_mel_bins": 128,
    "encoder_layers": 32,
    "encoder_attention_heads": 20,
    "encoder_ffn_dim": 5120,
    "d_model": 1280,
    "n_window": 100,
    "output_dim": 3584,
}


def config(settings: Settings) -> ModelConfig:
    """Return the `ModelConfig` of a Qwen2_5OmniThinkerConfig, or of the thinker in a Qwen2_5OmniConfig."""
    thinker = thinker_of(settings)
    indices = {f"{kind}_token_id": thinker.get(f"{kind}_token_index", None) for kind in ("image", "video", "audio")}
    thinker = with_defaults(Settings({**thinker.values, **indices}, thinker.where), _TOP)
    thinker.require("seconds_per_chunk", _TURN, why=f"videos and their sound take turns of {_TURN} seconds here")
    tower = with_defaults(thinker.section("vision_config"), qwen2_vl.WINDOWED_VISION)
    text = qwen_vl.text_model(
        with_defaults(thinker.section("text_config"), _TEXT),
        kind="qwen2",
        tied=thinker.get("tie_word_embeddings", False),
        section=(16, 24, 24),
        interleaved=False,
    )
    model = qwen_vl.model_config(
        thinker,
        tower=tower,
        vision=qwen2_vl.windowed(tower),
        text=text,
        steps_per_second=thinker.need("position_id_per_seconds"),
    )
    sounds = with_defaults(thinker.section("audio_config"), AUDIO_DEFAULTS)
    return replace(model, audio=audio_encoder(sounds, text.hidden_size), audio_token=thinker.need("audio_token_id"))


def thinker_of(settings: Settings) -> Settings:
    """Return the settings of the thinker, which may be a section of those of a model that speaks."""
    return settings.section("thinker_config") if "thinker_config" in settings.values else settings


def audio_encoder(sounds: Settings, outputs: int) -> AudioConfig:
    """Return the audio encoder of a Qwen2_5OmniAudioEncoderConfig."""
    sounds.require("activation_function", "gelu", why="only GELU is known here")
    if sounds.need("output_dim") != outputs:
        refuse(sounds, "output_dim", f"features must be as wide as the language model, {outputs}")
    return AudioConfig(
        num_layers=sounds.need("encoder_layers"),
        hidden_size=sounds.need("d_model"),
        ffn_hidden_size=sounds.need("encoder_ffn_dim"),
        num_attention_heads=sounds.need("encoder_attention_heads"),
        mel_bins=sounds.need("num_mel_bins"),
        chunk_frames=2 * sounds.need("n_window"),
    )


def table(model: ModelConfig, prefixes: NamePrefixes) -> Table:
    """Return Qwen2.5-VL's table with queries, keys and values apart, and that of the audio encoder."""
    names = qwen2_vl.table(model, prefixes)
    for place in range(model.vision.num_layers):
        layer, hf_layer = f"{VISION_LAYER}{place}.", f"{prefixes.vision}blocks.{place}."
        names |= qkv(f"{layer}self_attention.linear_qkv", f"{hf_layer}attn.{{}}", model.vision, bias=True)
    prefix = audio_prefix(prefixes)
    return {
        **names,
        **audio_layers(model, prefix, missing="k"),
        **module(f"{AUDIO_EMBED}.conv1", f"{prefix}conv1", "weight", "bias"),
        **module(f"{AUDIO_EMBED}.conv2", f"{prefix}conv2", "weight", "bias"),
        **linear(f"{AUDIO_PROJECTOR}.linear", f"{prefix}proj", bias=True),
    }


def audio_prefix(prefixes: NamePrefixes) -> str:
    """Return the prefix of the audio encoder's tensors, next to that of the vision tower."""
    return f"{prefixes.vision.removesuffix('visual.')}audio_tower."


def audio_layers(model: ModelConfig, prefix: str, *, missing: str = "") -> Table:
    """Return the table of the audio encoder's layers and of their last norm; files lack the biases of `missing`."""
    tower, names = audio_tower(model), linear(f"{AUDIO_PROJECTOR}.norm", f"{prefix}ln_post", bias=True)
    heads, width = tower.num_attention_heads, tower.hidden_size // tower.num_attention_heads
    for place in range(tower.num_layers):
        layer, hf_layer = f"{AUDIO_LAYER}{place}.", f"{prefix}layers.{place}."
        attention, pattern = f"{layer}self_attention.", f"{hf_layer}self_attn.{{}}_proj."
        names |= {
            f"{attention}linear_qkv.weight": QKV(f"{pattern}weight", heads, width),
            f"{attention}linear_qkv.bias": QKV(f"{pattern}bias", heads, width, missing=missing),
            **linear(f"{attention}linear_proj", f"{hf_layer}self_attn.out_proj", bias=True),
            **linear(f"{layer}input_layernorm", f"{hf_layer}self_attn_layer_norm", bias=True),
            **linear(f"{layer}pre_mlp_layernorm", f"{hf_layer}final_layer_norm", bias=True),
            **linear(f"{layer}mlp.linear_fc1", f"{hf_layer}fc1", bias=True),
            **linear(f"{layer}mlp.linear_fc2", f"{hf_layer}fc2", bias=True),
        }
    return names


def inputs(batch: Batch, model: ModelConfig) -> Given:
    """Return tokens, positions, patches, and the mel features of all sounds, padded to the longest."""
    import torch

    given = qwen_vl.inputs(batch, model)
    given.pop("mm_token_type_ids", None)
    given["position_ids"] = batch.text.positions.expand(3, *batch.text.tokens.shape)
    sounds = batch.sounds
    if sounds is None or not sounds.frames:
        return given
    mels = torch.nn.utils.rnn.pad_sequence(list(sounds.mels.split(sounds.frames)), batch_first=True)
    lengths = torch.tensor(sounds.frames, device=mels.device)
    mask = (torch.arange(mels.shape[1], device=mels.device) < lengths[:, None]).long()
    return given | {"input_features": mels.mT, "feature_attention_mask": mask}


@dataclass(frozen=True, kw_only=True)
class OmniVideo(QwenVideo):
    """Qwen2.5-VL's videos, but the times of groups follow from the requested frame rate, whatever the clip's."""

    def layout(self, clip: Clip, budget: Budget) -> Layout:
        found = super().layout(clip, budget)
        assert found.film is not None
        seconds = self.frames_per_patch / budget.rate_of_images
        moments = moments_of(self.groups(len(found.film.frames)), seconds, self.steps_per_second)
        return replace(found, film=replace(found.film, moments=moments))


def build_video(options: Json, model: ModelConfig, shared: dict[str, Any]) -> OmniVideo:
    """Return the video processor."""
    fields = {**shared, **video_fields(options, model, size=VIDEOS.defaults["size"]), **_MARKS}
    return OmniVideo(**fields, text=VIDEO)


def video_fields(options: Json, model: ModelConfig, *, size: Json) -> dict[str, Any]:
    """Return the fields of `OmniVideo` with the pixel bounds `size`, since Transformers ignores those in files."""
    bounds = {"min_pixels": None, "max_pixels": None, "size": size}
    kept = {name: value for name, value in {**options, **bounds}.items() if value is not None}
    steps = model.video_steps_per_second
    return {**qwen_fields(kept, model), "number": model.video_token, "steps_per_second": steps}


def build_processor(options: Json, model: ModelConfig, shared: dict[str, Any]) -> Processor:
    """Return the image processor, with that of sounds by WhisperFeatureExtractor's options in the same file."""
    built: Any = qwen_vl.build_processor(options, model, shared)
    longest = RATE * options.get("chunk_length", 300)
    marks = {"text": AUDIO, "start": "<|audio_bos|>", "end": "<|audio_eos|>"}
    turn = int((model.video_steps_per_second or 0) * _TURN)
    sounds = build_sounds(options, model, longest=longest, turn=turn, **marks)
    return replace(built, **_MARKS, image_token=IMAGE, placeholder=IMAGE.join(_MARKS.values()), sounds=sounds)


def build_sounds(options: Json, model: ModelConfig, **fields: Any) -> SoundProcessor:
    """Return the processor of sounds with these fields. Raises UserError for options that are not known here."""
    for name, known in {"feature_size": model.audio.mel_bins, **_SOUNDS}.items():
        require_model_value(options, name, known)
    assert model.audio_token is not None
    return SoundProcessor(audio=model.audio, number=model.audio_token, **fields)


FAMILY = Family(
    name="qwen2_5_omni",
    model_types=_TYPES,
    config=config,
    table=table,
    inputs=inputs,
    image_processors=(replace(qwen_vl.PROCESSOR, model_types=_TYPES, build=build_processor, ranges=RANGES),),
    videos=replace(VIDEOS, classes=(), model_types=_TYPES, build=build_video),
    image_text=IMAGE,
    chat_template=CHATML,
    unused=(r".*audio_tower\.audio_bos_eos_token\.weight", r"talker\..*", r"token2wav\..*"),
    name_prefixes=(
        NamePrefixes(vision="model.visual.", language="model.language_model."),
        NamePrefixes(vision="visual.", language="model."),
        NamePrefixes(vision="thinker.visual.", language="thinker.model.", head="thinker.lm_head.weight"),
    ),
    runs="Qwen2_5OmniThinkerForConditionalGeneration",
)
