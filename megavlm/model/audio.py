"""The two ends of the audio encoder, and the layout of sounds in its packed sequence.

As in Qwen2.5-Omni and Qwen3-Omni: convolutions and sinusoidal positions end with each chunk of a sound, attention with
each window of chunks (`arch/image_tokens.py`).

Legend: T mel frames of all sounds, M mel bins, C chunks, A positions and padding, Ha width, Fa features of sounds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from megavlm.arch.image_tokens import BLANK, chunk_lengths, features_of, positions_of, windows_of
from megavlm.config.derived import sequence_parallel
from megavlm.config.schema import AudioConfig
from megavlm.inputs.batch import SoundBatch
from megavlm.model.specs import LayerBuilder

_PERIODS = 10000.0  # the longest sinusoid is so many times as long as the shortest
_AT_ONCE = 500  # chunks whose maps are in memory together where nothing is trained: 1.5 GB in bf16 for Qwen3-Omni


@dataclass(frozen=True)
class SoundLayout:
    """Layout of the positions of a micro-batch's sounds in the packed sequence of the audio encoder.

    A micro-batch without sounds sends one blank sound through the encoder, as one without images sends a blank image
    (`model/vision.py`). The sequence is padded by one more window.
    """

    frames: tuple[int, ...]  # mel frames of each sound
    chunks: tuple[int, ...]  # mel frames of each chunk
    windows: tuple[int, ...]  # positions of each window
    padding: int  # positions
    is_blank: bool
    audio: AudioConfig

    @classmethod
    def of(cls, sounds: SoundBatch | None, audio: AudioConfig, *, multiple: int) -> SoundLayout:
        """Return the layout of sounds; `multiple` divides the number of positions."""
        found = () if sounds is None else sounds.frames
        is_blank, frames = not found, found or (BLANK,)
        chunks = tuple(length for each in frames for length in chunk_lengths(each, audio.chunk_frames))
        windows = tuple(length for each in frames for length in windows_of(each, audio))
        return cls(frames, chunks, windows, -sum(windows) % multiple, is_blank, audio)

    @property
    def bounds(self) -> list[int]:
        """Return the bounds of sequences: one for each window, and one for the padding, if any."""
        return list(accumulate([*self.windows, *[self.padding] * bool(self.padding)], initial=0))

    @property
    def usual(self) -> int:
        """Return the number of positions of a whole window."""
        return positions_of(self.audio.chunk_frames * self.audio.window_chunks, self.audio)

    @property
    def features(self) -> int:
        """Return the number of features."""
        return sum(self._features)

    def pairs(self, device: torch.device) -> Tensor:
        """Return the index of the first of the two positions of each feature, [Fa] int64."""
        counts = torch.tensor(self._features)
        starts = torch.tensor([0, *accumulate(positions_of(each, self.audio) for each in self.frames)][:-1])
        number = torch.arange(self.features) - (counts.cumsum(0) - counts).repeat_interleave(counts)
        return (starts.repeat_interleave(counts) + 2 * number).to(device, non_blocking=True)

    @property
    def _features(self) -> list[int]:
        return [features_of(each, self.audio) for each in self.frames]


def merged_sounds(sounds: SoundBatch | None, features: Tensor) -> tuple[Tensor, Tensor]:
    """Return the positions of audio tokens in this part of the text, [N], and their features, [N, Hl].

    `features` [Fa, 1, Hl] are those of all sounds, or of the blank one, which no position takes, or the received ones.
    """
    if sounds is None:
        return torch.empty(0, dtype=torch.int64, device=features.device), features[:0, 0]
    return sounds.positions, features[:, 0].index_select(0, sounds.rows)


class AudioEmbed(nn.Module):
    """Convolutions and sinusoidal positions: [T, M] → [A(/TP), 1, Ha].

    The output is computed whole on every tensor-parallel rank, then scattered, as in `PatchEmbed`.
    """

    def __init__(self, builder: LayerBuilder) -> None:
        super().__init__()
        audio, dtype = builder.config.model.audio, builder.audio.params_dtype
        self.audio, self.group = audio, builder.groups.tp
        self.sequence_parallel = sequence_parallel(builder.config)
        if audio.conv_channels is None:
            self.conv1: nn.Module = nn.Conv1d(audio.mel_bins, audio.hidden_size, 3, padding=1, dtype=dtype)
            self.conv2: nn.Module = nn.Conv1d(audio.hidden_size, audio.hidden_size, 3, 2, padding=1, dtype=dtype)
        else:
            channels = audio.conv_channels
            self.conv1 = nn.Conv2d(1, channels, 3, 2, padding=1, dtype=dtype)
            self.conv2 = nn.Conv2d(channels, channels, 3, 2, padding=1, dtype=dtype)
            self.conv3 = nn.Conv2d(channels, channels, 3, 2, padding=1, dtype=dtype)
            self.linear = nn.Linear(channels * -(-audio.mel_bins // 8), audio.hidden_size, bias=False, dtype=dtype)

    def forward(self, mels: Tensor | None, layout: SoundLayout) -> Tensor:
        weight: Any = self.conv1.weight
        if layout.is_blank or mels is None:
            mels = weight.new_zeros(sum(layout.frames), self.audio.mel_bins)
        chunks = pad_sequence(list(mels.to(weight.dtype).split(layout.chunks)), batch_first=True)
        hidden = self._over_time(chunks, layout) if self.audio.conv_channels is None else self._over_both(chunks)
        hidden = hidden + sinusoids(hidden.shape[1], hidden.shape[2], mels.device).to(hidden.dtype)
        lengths = [positions_of(length, self.audio) for length in layout.chunks]
        hidden = torch.cat([each[:length] for each, length in zip(hidden, lengths, strict=True)])
        hidden = F.pad(hidden, (0, 0, 0, layout.padding))[:, None]
        if self.sequence_parallel:
            hidden = scatter_to_sequence_parallel_region(hidden, group=self.group)
        return hidden

    def _over_time(self, chunks: Tensor, layout: SoundLayout) -> Tensor:
        within = [torch.arange(chunks.shape[1]) < length for length in layout.chunks]
        mask = torch.stack(within).to(chunks.device, non_blocking=True)[:, None]  # [C, 1, frames of the longest]
        return F.gelu(self.conv2(F.gelu(self.conv1(chunks.mT)) * mask)).mT

    def _over_both(self, chunks: Tensor) -> Tensor:
        """Return hidden states [C, positions, Ha] of chunks [C, frames, M].

        The convolutions see the padding behind a short chunk. Transformers pads to the longest chunk of a batch; here
        all are padded to whole ones, so that a sound does not depend on its neighbours.
        """
        padded = F.pad(chunks, (0, 0, 0, self.audio.chunk_frames - chunks.shape[1])).mT[:, None]
        hidden = torch.cat([self._maps(each) for each in padded.split(_AT_ONCE)])
        output: Tensor = self.linear(hidden.permute(0, 3, 1, 2).flatten(2))
        return output

    def _maps(self, hidden: Tensor) -> Tensor:
        for convolution in (self.conv1, self.conv2, self.conv3):
            hidden = F.gelu(convolution(hidden))
        return hidden


class AudioProjector(nn.Module):
    """The mean of every two positions, a norm, and a linear layer: [A(/TP), 1, Ha] → [Fa, 1, Hl].

    After convolutions over both axes, in place of the mean, an inner linear layer follows the norm.

    All tensor-parallel ranks compute it alike, so that the gradients of its weights need no reduction.
    """

    def __init__(self, builder: LayerBuilder) -> None:
        super().__init__()
        model, dtype = builder.config.model, builder.audio.params_dtype
        self.group, self.sequence_parallel = builder.groups.tp, sequence_parallel(builder.config)
        width = model.audio.hidden_size
        self.norm = nn.LayerNorm(width, dtype=dtype)
        self.inner = None if model.audio.conv_channels is None else nn.Linear(width, width, dtype=dtype)
        self.linear = nn.Linear(width, model.language.hidden_size, dtype=dtype)

    def forward(self, hidden: Tensor, layout: SoundLayout) -> Tensor:
        if self.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False, group=self.group)
        if self.inner is not None:
            output: Tensor = self.linear(F.gelu(self.inner(self.norm(hidden[: layout.features]))))
            return output
        first = layout.pairs(hidden.device)
        pooled = (hidden.index_select(0, first) + hidden.index_select(0, first + 1)) / 2
        output = self.linear(self.norm(pooled))
        return output


def sinusoids(length: int, width: int, device: torch.device) -> Tensor:
    """Return Whisper's positions (Radford et al. 2022), [length, width] fp32: sines of all periods, then cosines."""
    half = width // 2
    rates = torch.exp(-math.log(_PERIODS) / (half - 1) * torch.arange(half).float())
    angles = torch.arange(length)[:, None] * rates
    return torch.cat([angles.sin(), angles.cos()], dim=1).to(device, non_blocking=True)
