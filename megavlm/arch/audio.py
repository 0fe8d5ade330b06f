"""Layer kinds of the audio encoder. Its transformer layers are those of a vision encoder of its sizes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from megavlm.arch.image_tokens import positions_of
from megavlm.arch.kind import (
    FP32,
    Communication,
    HiddenWeight,
    LayerCost,
    LayerKind,
    Stream,
    hidden_weight,
    norm_bytes,
    stream_bytes,
)
from megavlm.arch.scenario import Scenario
from megavlm.arch.transformer import VisionLayer
from megavlm.arch.workload import Workload
from megavlm.config.derived import audio_tower
from megavlm.config.schema import AudioConfig, ModelConfig, VisionConfig

_TAPS = 3  # mel frames that a convolution reads


class AudioEmbed(LayerKind):
    """Two convolutions over time, the second with a stride of two, and sinusoidal positions.

    With `conv_channels` three convolutions over time and frequencies have strides of two, and a linear layer follows.

    It reads mel frames; the hidden states before it, features of images, pass by the audio encoder.
    """

    reads = Stream.IMAGES
    launches = (16, 16)  # not measured
    cpu_calls = 8

    def parameters(self, model: ModelConfig, tp: int) -> int:
        audio = model.audio
        biases = 2 * audio.hidden_size if audio.conv_channels is None else 3 * audio.conv_channels
        return sum(weights for weights, _ in _products(audio)) + biases

    def cost(self, model: ModelConfig, work: Workload, number: int) -> LayerCost:
        audio, products = model.audio, _products(model.audio)
        multiplied = sum(weights * times for weights, times in products) / positions_of(audio.chunk_frames, audio)
        return LayerCost(sum(weights for weights, _ in products), 2.0 * multiplied * work.frames)

    def saved_bytes(self, scenario: Scenario, *, trained: bool, core_attention: bool) -> float:
        """Return the bytes of mel features, of all inputs of GELU, and of what follows each GELU."""
        audio = scenario.model.audio
        if audio.conv_channels is not None:
            maps = 2 * audio.conv_channels * sum(_pixels(audio)) + audio.mel_bins * audio.chunk_frames
            chunks = -(-scenario.work.frames // positions_of(audio.chunk_frames, audio))
            return chunks * maps * scenario.bytes_each * trained
        widths = 2 * audio.mel_bins + (2 * 2 + 1) * audio.hidden_size
        return scenario.work.frames * (widths + 2 * audio.hidden_size) * scenario.bytes_each * trained


def _products(audio: AudioConfig) -> tuple[tuple[int, int], ...]:
    """Return the weights of each convolution and linear layer, and how often those of a whole chunk are multiplied."""
    frames, width = audio.chunk_frames, audio.hidden_size
    if (channels := audio.conv_channels) is None:
        return (audio.mel_bins * width * _TAPS, frames), (width * width * _TAPS, frames // 2)
    pairs = zip((1, channels, channels), _pixels(audio), strict=True)
    convolutions = ((before * channels * _TAPS**2, pixels) for before, pixels in pairs)
    return *convolutions, (channels * -(-audio.mel_bins // 8) * width, positions_of(frames, audio))


def _pixels(audio: AudioConfig) -> tuple[int, ...]:
    """Return the number of pixels, over time and frequencies, that each of three convolutions makes of a chunk."""
    return tuple(-(-audio.mel_bins // stride) * -(-audio.chunk_frames // stride) for stride in (2, 4, 8))


class AudioLayer(VisionLayer):
    """A transformer layer of the audio encoder."""

    reads = Stream.FRAMES

    def tower(self, model: ModelConfig) -> VisionConfig:
        return audio_tower(model)

    def model_parameters(self, model: ModelConfig) -> int:
        own = super().model_parameters(model)
        return own - model.audio.hidden_size * (model.audio.conv_channels is None)  # whose keys have no bias

    def seen(self, work: Workload) -> Workload:
        return replace(work, patches=work.frames, patch_squares=work.frame_squares)


class AudioProjector(LayerKind):
    """The mean of every two positions, a norm, and a linear layer to the width of the language model.

    With `conv_channels` an inner linear layer follows the norm, and there is no mean.
    """

    reads = Stream.FRAMES
    launches = (7, 10)  # not measured
    cpu_calls = 3

    def parameters(self, model: ModelConfig, tp: int) -> int:
        width, outputs = model.audio.hidden_size, model.language.hidden_size
        return (width + 1) * (outputs + width * _is_mlp(model)) + 2 * width

    def hidden_weights(self, model: ModelConfig) -> Mapping[str, HiddenWeight]:
        width = model.audio.hidden_size
        inner = {"inner.weight": hidden_weight(width, width)} if _is_mlp(model) else {}
        return {"linear.weight": hidden_weight(width, model.language.hidden_size), **inner}

    def cost(self, model: ModelConfig, work: Workload, number: int) -> LayerCost:
        width = model.audio.hidden_size
        weights = width * (model.language.hidden_size + width * _is_mlp(model))
        return LayerCost(weights, 2.0 * weights * work.sounds)

    def saved_bytes(self, scenario: Scenario, *, trained: bool, core_attention: bool) -> float:
        width, sounds = scenario.model.audio.hidden_size, scenario.work.sounds
        norm = norm_bytes(scenario, sounds, width, "LayerNorm")
        inputs = 3 if _is_mlp(scenario.model) else 1  # of linear layers and of GELU
        return norm + sounds * (inputs * width * scenario.bytes_each * trained + 2 * FP32)

    def communication(self, scenario: Scenario) -> Communication:
        return Communication((stream_bytes(self.reads, scenario),) * scenario.sequence_parallel)


def _is_mlp(model: ModelConfig) -> bool:
    return model.audio.conv_channels is not None
