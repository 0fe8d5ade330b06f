"""Video processors: Qwen-VL's, and one for frames of a fixed size that the tower sees as separate images.

In the Qwen-VL families consecutive frames share patches, frame sizes are bounded by an area, and a video is one run of
tokens with M-RoPE times; Qwen3-VL differs in part (`megavlm/families/qwen3_vl.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from megavlm.config.schema import ModelConfig
from megavlm.errors import UserError
from megavlm.families.shared.qwen_vl import native_bounds
from megavlm.inputs.layout import Prompt
from megavlm.inputs.reader import CLIP_PIXELS, Json, VideoReader, require_model_value, sides
from megavlm.inputs.resize import Pixels, Size, at_least, resize_as_torchvision, smart_resize
from megavlm.inputs.video import (
    Budget,
    Clip,
    VideoProcessor,
    first_of_parts,
    from_first_to_last,
    from_the_first,
    taken,
)

TEXT = "<|video_pad|>"
_ABOVE_LEAST = 1.05  # a token budget shrinks frames to this multiple of their minimum area, and no further


@dataclass(frozen=True, kw_only=True)
class QwenVideo(VideoProcessor):
    """Resizes all frames to one size near their own; a token budget makes frames smaller, then fewer."""

    is_bounded = True
    min_pixels: int  # of a frame
    max_pixels: int
    text: str = TEXT
    number: int | None = None  # the video token; None: features take the places of image tokens
    steps_per_second: float | None = None
    start: str = "<|vision_start|>"
    end: str = "<|vision_end|>"

    def numbers(self, clip: Clip, budget: Budget) -> tuple[int, ...]:
        return taken(clip, budget, from_the_first, multiple=self.frames_per_patch)

    def frame_size(self, size: Size, frames: int, budget: Budget) -> Size:
        own, groups = self.size_of(size, frames, most=budget.max_pixels), self.groups(frames)
        if budget.max_tokens is None or groups * self._tokens(self._tile(*own)) <= budget.max_tokens:
            return own
        share = max(budget.max_tokens * self.factor**2 // groups, self._least)
        return self.size_of(size, groups * self.frames_per_patch, most=share)

    def size_of(self, size: Size, frames: int, *, most: int | None) -> Size:
        """Return the size of frames with at most `most` pixels each; None: at most `max_pixels`."""
        return smart_resize(size, factor=self.factor, min_pixels=self.min_pixels, max_pixels=most or self.max_pixels)

    def most_groups(self, tokens: int) -> int:
        return tokens * self.factor**2 // self._least

    def prompt(self, clip: Clip, numbers: tuple[int, ...], tokens: int) -> Prompt:
        return Prompt(self.text, (self.start, self.end), (self.groups(len(numbers)) * tokens,), self.number)

    def moments(self, clip: Clip, numbers: tuple[int, ...]) -> tuple[int, ...]:
        # Sampled frames per second, as Transformers computes it: the sampled share of all frames times the clip's rate.
        seconds = self.frames_per_patch / (len(numbers) / len(clip.times) * clip.rate)
        return moments_of(self.groups(len(numbers)), seconds, self.steps_per_second)

    @property
    def factor(self) -> int:
        """Return the side of a feature in pixels."""
        return self.patch_size * self.projector.pixel_shuffle

    @property
    def _least(self) -> int:
        return max(int(self.min_pixels * _ABOVE_LEAST), self.factor**2)


@dataclass(frozen=True, kw_only=True)
class TimedPairs(QwenVideo):
    """Writes the time in seconds before each pair of frames. Pixel bounds apply to all frames together."""

    def numbers(self, clip: Clip, budget: Budget) -> tuple[int, ...]:
        return taken(clip, budget, from_first_to_last)

    def size_of(self, size: Size, frames: int, *, most: int | None) -> Size:
        return smart_resize(
            at_least(size, self.factor),
            factor=self.factor,
            min_pixels=self.min_pixels,
            max_pixels=self.max_pixels if most is None else most * frames,
            frames=max(frames, self.frames_per_patch),  # a single frame fills a pair
            span=self.frames_per_patch,
        )

    def prompt(self, clip: Clip, numbers: tuple[int, ...], tokens: int) -> Prompt:
        """Return one run of tokens per pair, all inside the chat template's own markers (Transformers since 5.12)."""
        groups = self.groups(len(numbers))
        marks = [f"<{seconds:.1f} seconds>{self.start}" for seconds in self._times(clip, numbers)]
        texts = (self.start + marks[0], *(self.end + mark for mark in marks[1:]), self.end + self.end)
        return Prompt(self.text, texts, (tokens,) * groups, self.number)

    def moments(self, clip: Clip, numbers: tuple[int, ...]) -> tuple[int, ...]:
        return ()

    def _times(self, clip: Clip, numbers: tuple[int, ...]) -> list[float]:
        """Return the time of each pair: the mean of its first and last frame's. The last frame may be repeated."""
        span, seconds = self.frames_per_patch, [clip.seconds(number) for number in numbers]
        seconds += [seconds[-1]] * (-len(seconds) % span)
        return [(seconds[at] + seconds[at + span - 1]) / 2 for at in range(0, len(seconds), span)]


def moments_of(groups: int, seconds: float, steps_per_second: float | None) -> tuple[int, ...]:
    """Return the time of each group of frames in M-RoPE steps, rounded down, in fp32 as in the reference.

    Args:
        groups: number of groups of frames.
        seconds: time from one group to the next.
        steps_per_second: M-RoPE steps per second; None: groups are one step apart (Qwen2-VL).
    """
    if steps_per_second is None:
        return tuple(range(groups))
    step = np.float32(steps_per_second) * np.float32(seconds)
    return tuple((np.arange(groups, dtype=np.float32) * step).astype(np.int64).tolist())


def build_video(options: Json, model: ModelConfig, shared: dict[str, Any]) -> VideoProcessor | None:
    """Return the video processor of Qwen2-VL and Qwen2.5-VL; None for a model without a video token."""
    if model.video_token is None:
        return None
    fields = {**shared, **qwen_fields(options, model)}
    return QwenVideo(**fields, number=model.video_token, steps_per_second=model.video_steps_per_second)


def qwen_fields(options: Json, model: ModelConfig) -> dict[str, Any]:
    """Return the video processor's fields that all Qwen-VL and GLM-V families read from their options.

    Raises UserError if the patch, temporal patch or merge size is not the model's.
    """
    frames = model.vision.temporal_patch_size
    require_model_value(options, "temporal_patch_size", frames)
    return {"frames_per_patch": frames, **native_bounds(options, model, file="video_preprocessor_config.json")}


VIDEOS = VideoReader(
    ("Qwen2VL", "Qwen2_5_VL"),
    ("qwen2_vl", "qwen2_5_vl"),
    {**CLIP_PIXELS, "size": {"shortest_edge": 128 * 28**2, "longest_edge": 768 * 28**2}},
    Budget(),
    build_video,
)


@dataclass(frozen=True, kw_only=True)
class Frames(VideoProcessor):
    """Resizes each frame to `size`, whatever its shape; a token budget reduces the frames. Families add the text."""

    size: Size

    def __post_init__(self) -> None:
        if min(self.size) < self.patch_size * self.projector.pixel_shuffle:
            raise UserError(
                f"frames of {self.size[0]}×{self.size[1]} pixels have no feature: correct size in "
                "video_preprocessor_config.json"
            )

    def places(self, count: int, frames: int) -> list[int]:
        """Return the numbers of `frames` of `count` frames."""
        return first_of_parts(count, frames)

    def numbers(self, clip: Clip, budget: Budget) -> tuple[int, ...]:
        return taken(clip, budget, self.places)

    def frame_size(self, size: Size, frames: int, budget: Budget) -> Size:
        return self.size

    def most_groups(self, tokens: int) -> int:
        return tokens // self._tokens(self._tile(*self.size))

    def resized(self, pixels: Pixels, grid: tuple[int, int]) -> Pixels:
        return resize_as_torchvision(pixels, *self.size, self.resample)


def frame_fields(options: Json) -> dict[str, Any]:
    """Return the fields of `Frames` that a video processor's options give. Raises UserError for a centre crop."""
    if options.get("do_center_crop"):
        raise UserError("do_center_crop in video_preprocessor_config.json is not supported: remove it")
    return {"size": sides(options["size"], "size")}
