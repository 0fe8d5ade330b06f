"""Videos of Qwen2-VL and Qwen2.5-VL: two frames a patch, one run of tokens a clip, and M-RoPE's time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from PIL.Image import Resampling

from megavlm.arch.image_tokens import tokens_per_grid
from megavlm.config.schema import ModelConfig
from megavlm.data.processors import sizes
from megavlm.data.processors.expected import OPTIONS
from megavlm.data.processors.layout import Film, Layout, Prompt
from megavlm.data.processors.reader import CLIP_PIXELS, Json, has_only, require_model_value
from megavlm.data.processors.sampling import Budget, Clip, taken
from megavlm.data.processors.sizes import Size
from megavlm.data.processors.video import VideoProcessor
from megavlm.errors import UserError
from megavlm.families.shared.settings import Settings
from megavlm.json_files import check

TEXT = "<|video_pad|>"
_ABOVE_LEAST = 1.05  # a budget shrinks frames to this multiple of their least area, and no further
_OPTIONS: Json = {**CLIP_PIXELS, "size": {"shortest_edge": 128 * 28**2, "longest_edge": 768 * 28**2}}


def with_videos(model: ModelConfig, settings: Settings, *, steps_per_second: float | None) -> ModelConfig:
    """Return the model with its video token and the time of its positions; None: a step for each group of frames."""
    return replace(model, video_token=settings.get("video_token_id", 151656), video_steps_per_second=steps_per_second)


@dataclass(frozen=True, kw_only=True)
class QwenVideo(VideoProcessor):
    """Resizes frames to one size near their own; a budget of tokens makes them smaller, then fewer."""

    min_pixels: int  # of a frame
    max_pixels: int
    number: int | None  # the video token
    steps_per_second: float | None
    start: str = "<|vision_start|>"
    end: str = "<|vision_end|>"

    def layout(self, clip: Clip, budget: Budget) -> Layout:
        span = self.frames_per_patch
        numbers = taken(clip, self._affordable(budget), multiple=span)
        groups = -(-len(numbers) // span)
        tile = self._tile(*self._resized((clip.height, clip.width), frames=groups * span, budget=budget))
        features = groups * tokens_per_grid(tile.grid, self.projector)
        # Frames per second of those that are taken, as Transformers computes it: the share of all, times their rate.
        seconds = span / (len(numbers) / len(clip.times) * clip.rate)
        return Layout(
            size=(clip.height, clip.width),
            tiles=(tile,) * groups,
            arrangement=(0, 0),
            prompt=Prompt(self.text, (self.start, self.end), (features,), self.number),
            film=Film(
                frames=numbers,
                seconds=tuple(clip.times[number] for number in numbers),
                moments=moments_of(groups, seconds, self.steps_per_second),
            ),
        )

    def _resized(self, size: Size, *, frames: int, budget: Budget) -> Size:
        most = self.max_pixels
        if budget.max_tokens is not None:
            whole = budget.max_tokens * self._factor**2
            most = max(min(most, whole * self.frames_per_patch // frames), self._least)
        return sizes.smart_resize(size, factor=self._factor, min_pixels=self.min_pixels, max_pixels=most)

    def _affordable(self, budget: Budget) -> Budget:
        """Return a budget of no more frames than have a token each of the least area."""
        if budget.max_tokens is None:
            return budget
        groups = max(budget.max_tokens * self._factor**2 // self._least, 1)
        most = min(budget.max_frames, groups * self.frames_per_patch)
        return replace(budget, max_frames=most, min_frames=min(budget.min_frames, most))

    @property
    def _least(self) -> int:
        return int(self.min_pixels * _ABOVE_LEAST)

    @property
    def _factor(self) -> int:
        return self.patch_size * self.projector.pixel_shuffle


def moments_of(groups: int, seconds: float, steps_per_second: float | None) -> tuple[int, ...]:
    """Return the time of each group of frames in steps of M-RoPE, rounded down, in fp32 as in the reference.

    Args:
        seconds: from one group to the next.
        steps_per_second: steps of a second; None: groups are one step apart (Qwen2-VL).
    """
    if steps_per_second is None:
        return tuple(range(groups))
    step = np.float32(steps_per_second) * np.float32(seconds)
    return tuple((np.arange(groups, dtype=np.float32) * step).astype(np.int64).tolist())


def read_video_processor(given: Mapping[str, Any], model: ModelConfig) -> VideoProcessor:
    """Return the processor that the options of a video processor describe, or of an image processor in its place.

    Raises UserError if its patches are not the model's.
    """
    options = {**_OPTIONS, **{key: value for key, value in given.items() if value is not None}}
    check(options, OPTIONS, "video_preprocessor_config.json")
    vision = model.vision
    require_model_value(options, "patch_size", vision.patch_size)
    require_model_value(options, "merge_size", model.projector.pixel_shuffle)
    require_model_value(options, "temporal_patch_size", vision.temporal_patch_size)
    size = options["size"]
    if not has_only(size, "shortest_edge", "longest_edge"):
        raise UserError("size in video_preprocessor_config.json must give shortest_edge and longest_edge, as areas")
    return QwenVideo(
        patch_size=vision.patch_size,
        frames_per_patch=vision.temporal_patch_size,
        projector=model.projector,
        resample=Resampling(options["resample"]),
        mean=tuple(options["image_mean"]),
        std=tuple(options["image_std"]),
        text=TEXT,
        min_pixels=options.get("min_pixels", size["shortest_edge"]),
        max_pixels=options.get("max_pixels", size["longest_edge"]),
        number=model.video_token,
        steps_per_second=model.video_steps_per_second,
    )
