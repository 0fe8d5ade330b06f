"""The two ends of the audio encoder, and the layout of sounds in its packed sequence.

As in Qwen2.5-Omni: convolutions, sinusoidal positions and attention end with each chunk of a sound
(`arch/image_tokens.py`).

Legend: T mel frames of all sounds, M mel bins, C chunks, A positions and padding, Ha width, Fa features of sounds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from megavlm.arch.image_tokens import BLANK, chunk_lengths, features_of, positions_of
from megavlm.config.derived import sequence_parallel
from megavlm.inputs.batch import SoundBatch
from megavlm.model.specs import LayerBuilder

_PERIODS = 10000.0  # the longest sinusoid is so many times as long as the shortest


@dataclass(frozen=True)
class SoundLayout:
    """Layout of the positions of a micro-batch's sounds in the packed sequence of the audio encoder.

    A micro-batch without sounds sends one blank sound through the encoder, as one without images sends a blank image
    (`model/vision.py`). The sequence is padded by one more chunk.
    """

    frames: tuple[int, ...]  # mel frames of each sound
    chunks: tuple[int, ...]  # mel frames of each chunk
    padding: int  # positions
    is_blank: bool

    @classmethod
    def of(cls, sounds: SoundBatch | None, *, chunk: int, multiple: int) -> SoundLayout:
        """Return the layout of sounds in chunks of so many mel frames; `multiple` divides the number of positions."""
        found = () if sounds is None else sounds.frames
        is_blank, frames = not found, found or (BLANK,)
        chunks = tuple(length for each in frames for length in chunk_lengths(each, chunk))
        return cls(frames, chunks, -sum(map(positions_of, chunks)) % multiple, is_blank)

    @property
    def bounds(self) -> list[int]:
        """Return the bounds of sequences: one for each chunk, and one for the padding, if any."""
        lengths = [*map(positions_of, self.chunks), *[self.padding] * bool(self.padding)]
        return list(accumulate(lengths, initial=0))

    @property
    def features(self) -> int:
        """Return the number of features."""
        return sum(map(features_of, self.frames))

    def pairs(self, device: torch.device) -> Tensor:
        """Return the index of the first of the two positions of each feature, [Fa] int64."""
        counts = torch.tensor([features_of(each) for each in self.frames])
        starts = torch.tensor([0, *accumulate(map(positions_of, self.frames))][:-1])
        number = torch.arange(self.features) - (counts.cumsum(0) - counts).repeat_interleave(counts)
        return (starts.repeat_interleave(counts) + 2 * number).to(device, non_blocking=True)


def merged_sounds(sounds: SoundBatch | None, features: Tensor) -> tuple[Tensor, Tensor]:
    """Return the positions of audio tokens in this part of the text, [N], and their features, [N, Hl].

    `features` [Fa, 1, Hl] are those of all sounds, or of the blank one, which no position takes.
    """
    if sounds is None:
        return torch.empty(0, dtype=torch.int64, device=features.device), features[:0, 0]
    return sounds.positions, features[:, 0].index_select(0, sounds.rows)


class AudioEmbed(nn.Module):
    """Two convolutions over time and sinusoidal positions: [T, M] → [A(/TP), 1, Ha].

    The output is computed whole on every tensor-parallel rank, then scattered, as in `PatchEmbed`.
    """

    def __init__(self, builder: LayerBuilder) -> None:
        super().__init__()
        audio, dtype = builder.config.model.audio, builder.audio.params_dtype
        self.mel_bins, self.group = audio.mel_bins, builder.groups.tp
        self.sequence_parallel = sequence_parallel(builder.config)
        self.conv1 = nn.Conv1d(audio.mel_bins, audio.hidden_size, 3, padding=1, dtype=dtype)
        self.conv2 = nn.Conv1d(audio.hidden_size, audio.hidden_size, 3, stride=2, padding=1, dtype=dtype)

    def forward(self, mels: Tensor | None, layout: SoundLayout) -> Tensor:
        if layout.is_blank or mels is None:
            mels = self.conv1.weight.new_zeros(sum(layout.frames), self.mel_bins)
        chunks = pad_sequence(list(mels.to(self.conv1.weight.dtype).split(layout.chunks)), batch_first=True)
        within = [torch.arange(chunks.shape[1]) < length for length in layout.chunks]
        mask = torch.stack(within).to(mels.device, non_blocking=True)[:, None]  # [C, 1, frames of the longest]
        hidden = F.gelu(self.conv2(F.gelu(self.conv1(chunks.mT)) * mask)).mT
        hidden = hidden + sinusoids(hidden.shape[1], hidden.shape[2], mels.device).to(hidden.dtype)
        lengths = map(positions_of, layout.chunks)
        hidden = torch.cat([each[:length] for each, length in zip(hidden, lengths, strict=True)])
        hidden = F.pad(hidden, (0, 0, 0, layout.padding))[:, None]
        if self.sequence_parallel:
            hidden = scatter_to_sequence_parallel_region(hidden, group=self.group)
        return hidden


class AudioProjector(nn.Module):
    """The mean of every two positions, a norm, and a linear layer: [A(/TP), 1, Ha] → [Fa, 1, Hl].

    All tensor-parallel ranks compute it alike, so that the gradients of its weights need no reduction.
    """

    def __init__(self, builder: LayerBuilder) -> None:
        super().__init__()
        model, dtype = builder.config.model, builder.audio.params_dtype
        self.group, self.sequence_parallel = builder.groups.tp, sequence_parallel(builder.config)
        self.norm = nn.LayerNorm(model.audio.hidden_size, dtype=dtype)
        self.linear = nn.Linear(model.audio.hidden_size, model.language.hidden_size, dtype=dtype)

    def forward(self, hidden: Tensor, layout: SoundLayout) -> Tensor:
        if self.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False, group=self.group)
        first = layout.pairs(hidden.device)
        pooled = (hidden.index_select(0, first) + hidden.index_select(0, first + 1)) / 2
        output: Tensor = self.linear(self.norm(pooled))
        return output


def sinusoids(length: int, width: int, device: torch.device) -> Tensor:
    """Return Whisper's positions (Radford et al. 2022), [length, width] fp32: sines of all periods, then cosines."""
    half = width // 2
    rates = torch.exp(-math.log(_PERIODS) / (half - 1) * torch.arange(half).float())
    angles = torch.arange(length)[:, None] * rates
    return torch.cat([angles.sin(), angles.cos()], dim=1).to(device, non_blocking=True)
