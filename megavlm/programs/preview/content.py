"""Define the values that the preview page shows."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megavlm.data.types import Skipped

Decode = Callable[[Sequence[int]], str]
_CONTEXT = 8  # tokens that are decoded together with those after them


@dataclass(frozen=True)
class Stretch:
    """Holds the text of neighbouring tokens that are all trained or all not; that of image tokens is their number."""

    text: str
    trained: bool
    image: bool = False
    video: bool = False  # image tokens of a video


@dataclass(frozen=True, eq=False)
class Shown:
    """Holds a sample with its text and images; each image is the pictures of it that the vision tower receives."""

    label: str
    source: int
    length: int
    images: tuple[tuple[NDArray[np.uint8], ...], ...]  # [height, width, 3] each
    seconds: tuple[tuple[float, ...], ...]  # when the frames of each video are shown; () for an image
    stretches: tuple[Stretch, ...]


@dataclass(frozen=True)
class PackedSegment:
    """Describes one sample, or a piece of one, in a packed sequence: its tokens (`length`) and its number of images."""

    label: str
    source: int
    length: int
    images: int


@dataclass(frozen=True)
class SourceShare:
    """Describes a data set and how many of the previewed samples are from it."""

    name: str
    records: int | None  # None for a stream
    share: float  # of the samples of a run
    drawn: int  # number of the previewed samples


@dataclass(frozen=True)
class PreviewContent:
    """Describes one packing window: how its samples are packed, which are skipped, and some of them in full."""

    title: str
    facts: tuple[tuple[str, str], ...]
    seq_length: int
    read: int
    sources: tuple[SourceShare, ...]
    sequences: tuple[tuple[PackedSegment, ...], ...]
    skipped: tuple[Skipped, ...]
    shown: tuple[Shown, ...]
    warnings: tuple[str, ...] = ()

    @property
    def segments(self) -> tuple[PackedSegment, ...]:
        return tuple(segment for sequence in self.sequences for segment in sequence)

    @property
    def efficiency(self) -> float:
        """Return the share of the sequences' positions that hold a token."""
        positions = self.seq_length * len(self.sequences)
        return sum(segment.length for segment in self.segments) / positions if positions else 0.0


def stretches_of(
    tokens: Sequence[int],
    trained: Sequence[bool],
    *,
    image_tokens: Collection[int],
    decode: Decode,
    video_tokens: Collection[int] = (),
) -> tuple[Stretch, ...]:
    """Return a sample's text in stretches: a new one begins where training begins or ends, and at images.

    `video_tokens` are those of the image tokens that stand for videos alone.

    Each stretch is decoded together with the tokens before it, because a tokenizer's spaces depend on them.
    """
    found: list[Stretch] = []
    at = 0
    while at < len(tokens):
        image, video = tokens[at] in image_tokens, tokens[at] in video_tokens
        kind, end = (image, video), at + 1
        while end < len(tokens) and trained[end] == trained[at]:
            if (tokens[end] in image_tokens, tokens[end] in video_tokens) != kind:
                break
            end += 1
        if image:
            found.append(Stretch(str(end - at), trained=False, image=True, video=video))
        else:
            before = [token for token in tokens[max(0, at - _CONTEXT) : at] if token not in image_tokens]
            text = decode([*before, *tokens[at:end]])[len(decode(before)) :]
            found.append(Stretch(text, bool(trained[at])))
        at = end
    return tuple(found)
