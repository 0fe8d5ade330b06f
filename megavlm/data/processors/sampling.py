"""Choose the frames of a clip that a model sees. Pure arithmetic.

`taken` follows Qwen's video processor in Transformers, and `Budget` the limit of pixels in `qwen-vl-utils`: as many
frames as `--video-fps` asks for, evenly over the clip, and smaller frames rather than more tokens than are allowed.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

_NEAR = 0.02  # by how much the rate that a file states may differ from that of its frames


@dataclass(frozen=True)
class Clip:
    """What is known of a clip before its frames are decoded."""

    height: int  # of the upright picture
    width: int
    times: tuple[float, ...]  # seconds from the first frame at which each frame is shown, rising
    rate: float  # frames per second


@dataclass(frozen=True)
class Budget:
    """How many frames of a clip are taken at most, at which rate, and how many tokens they may become."""

    fps: float = 2.0
    max_frames: int = 768
    max_tokens: int | None = None  # None: as many as the frames have at the model's own size
    min_frames: int = 4


def rate_of(times: Sequence[float], stated: float | None) -> float:
    """Return the frames per second of a clip whose frames are shown at `times` (seconds, rising).

    It is the rate that the file states, unless the times contradict it: containers state a nominal rate for clips
    whose frames come at irregular times. A single frame lasts as long as at 24 frames per second.
    """
    span = times[-1] - times[0] if times else 0.0
    if span <= 0:
        return stated or 24.0
    own = (len(times) - 1) / span
    # A file's rate counts the last frame's duration, which nothing but the file states: allow for one frame.
    if stated and abs(stated / own - 1) <= _NEAR + 1 / len(times):
        return stated
    return own


def taken(clip: Clip, budget: Budget, *, multiple: int) -> tuple[int, ...]:
    """Return the numbers of the frames that are taken, rising; at least one.

    A clip of n frames at `rate` per second lasts n / rate seconds, and gives fps frames for each of them: at least
    `min_frames`, at most `max_frames` and n, rounded down to a multiple of `multiple` (the frames in a patch). They are
    evenly spaced in time. Frame i of k is the one that is shown nearest to i·n/k frames after the first: where frames
    come at equal intervals, number ⌊i·n/k⌋.
    """
    times, rate, count = clip.times, clip.rate, len(clip.times)
    most = min(budget.max_frames, count) // multiple * multiple
    wanted = min(max(count / rate * budget.fps, budget.min_frames), most)
    frames = max(math.floor(wanted / multiple) * multiple, 1)
    return tuple(dict.fromkeys(_nearest(times, times[0] + place / rate) for place in _places(count, frames)))


def _places(count: int, frames: int) -> list[int]:
    """Return `frames` of `count` places, evenly spaced, rounded as the reference rounds them: in fp32."""
    import torch  # not at the top: families, which the planner reads, import this file

    return [int(place) for place in torch.arange(0, count, count / frames).int().tolist()]


def _nearest(times: Sequence[float], moment: float) -> int:
    """Return the number of the frame that is shown nearest to a moment."""
    after = bisect_left(times, moment)
    if after == 0 or after == len(times):
        return min(after, len(times) - 1)
    return after if times[after] - moment <= moment - times[after - 1] else after - 1
