"""Layer kinds of the audio encoder. Its transformer layers are those of a vision encoder of its sizes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

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
from megavlm.config.schema import ModelConfig, VisionConfig

_TAPS = 3  # mel frames that a convolution reads


class AudioEmbed(LayerKind):
    """Two convolutions over time, the second with a stride of two, and sinusoidal positions.

    It reads mel frames; the hidden states before it, features of images, pass by the audio encoder.
    """

    reads = Stream.IMAGES
    launches = (16, 16)  # not measured
    cpu_calls = 8

    def parameters(self, model: ModelConfig, tp: int) -> int:
        return self._weights(model) + 2 * model.audio.hidden_size

    def cost(self, model: ModelConfig, work: Workload, number: int) -> LayerCost:
        audio, weights = model.audio, self._weights(model)
        first = audio.mel_bins * audio.hidden_size * _TAPS  # runs for each mel frame, two of which make a position
        return LayerCost(weights, 2.0 * (first + weights) * work.frames)

    def saved_bytes(self, scenario: Scenario, *, trained: bool, core_attention: bool) -> float:
        """Return the bytes of mel features, of both inputs of GELU, and of the second convolution's input."""
        audio = scenario.model.audio
        widths = 2 * audio.mel_bins + (2 * 2 + 1) * audio.hidden_size
        return scenario.work.frames * (widths + 2 * audio.hidden_size) * scenario.bytes_each * trained

    def _weights(self, model: ModelConfig) -> int:
        audio = model.audio
        return (audio.mel_bins + audio.hidden_size) * audio.hidden_size * _TAPS


class AudioLayer(VisionLayer):
    """A transformer layer of the audio encoder."""

    reads = Stream.FRAMES

    def tower(self, model: ModelConfig) -> VisionConfig:
        return audio_tower(model)

    def model_parameters(self, model: ModelConfig) -> int:
        return super().model_parameters(model) - model.audio.hidden_size  # keys have no bias in the model

    def seen(self, work: Workload) -> Workload:
        return replace(work, patches=work.frames, patch_squares=work.frame_squares)


class AudioProjector(LayerKind):
    """The mean of every two positions, a norm, and a linear layer to the width of the language model."""

    reads = Stream.FRAMES
    launches = (7, 10)  # not measured
    cpu_calls = 3

    def parameters(self, model: ModelConfig, tp: int) -> int:
        width, outputs = model.audio.hidden_size, model.language.hidden_size
        return (width + 1) * outputs + 2 * width

    def hidden_weights(self, model: ModelConfig) -> Mapping[str, HiddenWeight]:
        return {"linear.weight": hidden_weight(model.audio.hidden_size, model.language.hidden_size)}

    def cost(self, model: ModelConfig, work: Workload, number: int) -> LayerCost:
        weights = model.audio.hidden_size * model.language.hidden_size
        return LayerCost(weights, 2.0 * weights * work.sounds)

    def saved_bytes(self, scenario: Scenario, *, trained: bool, core_attention: bool) -> float:
        width, sounds = scenario.model.audio.hidden_size, scenario.work.sounds
        norm = norm_bytes(scenario, sounds, width, "LayerNorm")
        return norm + sounds * (width * scenario.bytes_each * trained + 2 * FP32)

    def communication(self, scenario: Scenario) -> Communication:
        return Communication((stream_bytes(self.reads, scenario),) * scenario.sequence_parallel)
