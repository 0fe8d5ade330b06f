"""Sounds as inputs of a model: log-mel features, as Transformers' WhisperFeatureExtractor computes them.

Legend: n samples of a sound, T mel frames, M mel bins.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain, zip_longest
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from megavlm.arch.image_tokens import features_of
from megavlm.config.schema import AudioConfig
from megavlm.inputs.bad_sample import BadSample, Reason
from megavlm.inputs.layout import Layout, Prompt

if TYPE_CHECKING:  # families are read where torch is not needed, as by the planner
    from torch import Tensor

RATE = 16_000  # samples a second
_HOP, _WINDOW = 160, 400  # samples from one frame to the next, and of a frame
FRAME_RATE = RATE / _HOP  # mel frames a second
_FLOOR, _RANGE = 1e-10, 8.0  # least power, and how far below the loudest (in powers of ten) quieter ones are raised to


@dataclass(frozen=True, eq=False)
class Sound:
    """A sound whose number of mel frames is known before its features are made."""

    frames: int
    mels: Callable[[], Tensor]  # → [T, M] fp32


@dataclass(frozen=True)
class SoundProcessor:
    """Turns the sounds of one model into mel features and text. `number` is the id of the audio token `text`.

    With `padded`, silence follows a sound, as in a reference that pads sounds to `longest`. Otherwise the end is that
    of a sound alone in a batch: the signal is reflected there, and each frame begins before the last whole hop. Sound
    and frames of a video are interleaved, `turn` M-RoPE steps of each at a time; None: as in `with_sound`.
    """

    audio: AudioConfig
    longest: int  # samples of a sound that are read
    text: str
    number: int
    start: str
    end: str
    padded: bool = True
    turn: int | None = None

    def layout(self, samples: int, image_token: str) -> Layout:
        """Return the prompt of a sound, in whose place the tokenizer sees an image. Raises BadSample for a click."""
        frames = self.frames_of(min(samples, self.longest))
        if not (features := features_of(frames, self.audio)) or samples <= _WINDOW // 2:
            raise BadSample(Reason.NO_FRAMES, f"the sound has {samples} samples, too few for a feature")
        prompt = Prompt(image_token, (self.start, self.end), (features,), self.number)
        return Layout((frames, self.audio.mel_bins), (), (0, 0), prompt, frames=frames)

    def mels(self, samples: NDArray[np.float32]) -> Tensor:
        """Return the log-mel features [T, M] fp32 of samples [n] between −1 and 1, of which `longest` are read.

        Of a padded sound, the frames at its end count for the maximum, below which quieter values are clamped.
        """
        import torch

        given = torch.from_numpy(samples[: self.longest].astype(np.float32, copy=False))
        padded = torch.nn.functional.pad(given, (0, min(_WINDOW, self.longest - len(given)) * self.padded))
        spectrum = torch.stft(padded, _WINDOW, _HOP, window=torch.hann_window(_WINDOW), return_complex=True)
        power = torch.from_numpy(_mel_filters(self.audio.mel_bins)) @ spectrum[:, :-1].abs() ** 2
        logs = power.clamp(min=_FLOOR).log10()
        logs = torch.maximum(logs, logs.max() - _RANGE)
        return ((logs + 4) / 4)[:, : self.frames_of(len(given))].T.contiguous()

    def frames_of(self, samples: int) -> int:
        """Return the number of mel frames of a sound."""
        return -(-samples // _HOP) if self.padded else samples // _HOP


def with_sound(video: Layout, sound: Layout, *, turn: int | None) -> Layout:
    """Return the layout of a video and its sound, with tokens interleaved, `turn` M-RoPE steps of each at a time.

    If `turn` is None, its sound follows each group of frames, and marks have positions of their own (Qwen3-Omni).
    """
    assert video.film is not None
    shares_marks = turn is not None
    turn = turn or next(iter(video.film.moments[1:]), sound.features)
    times = np.repeat(video.film.moments, video.features // len(video.film.moments)).tolist()
    pieces = tuple(chain(*zip_longest(_turns(times, turn), _turns(range(sound.features), turn), fillvalue=0)))
    (first, last), (start, end) = video.prompt.texts, sound.prompt.texts
    prompt = replace(
        video.prompt,
        texts=(first + start, *[""] * (len(pieces) - 1), end + last),
        runs=pieces,
        each=(video.prompt.number, sound.prompt.number) * (len(pieces) // 2),
    )
    film = replace(video.film, pieces=pieces, shares_marks=shares_marks)
    return replace(video, prompt=prompt, film=film, frames=sound.frames)


def in_turn(video: NDArray[np.int64], pieces: Sequence[int]) -> tuple[NDArray[np.int64], int]:
    """Return positions [3, tokens] of a video interleaved with its sound, given the video's, and the first free one.

    Features of the sound have the positions 0, 1, …; the first free one follows those of the last turn.
    """
    sound = np.tile(np.arange(sum(pieces[1::2])), (3, 1))
    parts = (np.split(each, np.cumsum(pieces[at::2])[:-1], axis=1) for at, each in enumerate((video, sound)))
    turns = [turn for turn in chain(*zip(*parts, strict=True)) if turn.size]
    return np.concatenate(turns, axis=1), int(turns[-1].max()) + 1


def _turns(times: Iterable[int], turn: int) -> list[int]:
    """Return the number of ascending times in each turn; as in the reference, a time begins at most one turn."""
    counts = [0]
    for time in times:
        if time >= len(counts) * turn:
            counts.append(0)
        counts[-1] += 1
    return counts


def drawn(mels: Tensor) -> NDArray[np.uint8]:
    """Return log-mel features [T, M] as a grey picture [M, T, 3], the lowest frequency at the bottom."""
    shades = (mels - mels.min()) / (mels.max() - mels.min()).clamp(min=_FLOOR) * 255
    grey: NDArray[np.uint8] = shades.byte().numpy()
    return np.repeat(grey.T[::-1, :, None], 3, axis=2)


@lru_cache(maxsize=4)
def _mel_filters(bins: int) -> NDArray[np.float32]:
    """Return Slaney's triangular filters [M, frequencies], each of area one, between 0 Hz and 8 kHz.

    Mel frequencies are equally far apart in Hz up to 1 kHz, and in octaves above.
    """
    step, growth, knee = 200 / 3, math.log(6.4) / 27, 15  # Hz a mel; ln(frequency) a mel, from 1 kHz = 15 mel on
    mels = np.linspace(0, knee + math.log(RATE / 2 / 1000) / growth, bins + 2)
    edges = np.where(mels < knee, step * mels, 1000 * np.exp(growth * (mels - knee)))
    distances = edges[:, None] - np.linspace(0, RATE / 2, _WINDOW // 2 + 1)
    widths = np.diff(edges)[:, None]
    filters = np.minimum(-distances[:-2] / widths[:-1], distances[2:] / widths[1:]).clip(min=0)
    return (filters * (2 / (edges[2:] - edges[:-2]))[:, None]).astype(np.float32)
