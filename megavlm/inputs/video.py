"""`VideoProcessor`: sample and prepare the frames of a clip for a model. `layout` computes sizes, `patches` pixels.

Each family has a subclass, which determines the frame numbers, the frame size and the text of a video.
`--video-fps` sets the number of frames. They are spread evenly over the clip, at the same places as by the family's
video processor in Transformers.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy.typing import NDArray
from PIL.Image import Resampling

from megavlm.arch.image_tokens import tokens_per_grid
from megavlm.config.schema import ProjectorConfig
from megavlm.inputs.bad_sample import BadSample, Reason
from megavlm.inputs.layout import Film, Layout, Prompt, Tile
from megavlm.inputs.patches import cells_of, normalised
from megavlm.inputs.resize import Pixels, Size, resize_as_torchvision

if TYPE_CHECKING:
    from torch import Tensor

Places = Callable[[int, int], Sequence[int]]  # (frames of a clip, frames to sample) → frame numbers, ascending
_NEAR = 0.02  # allowed relative difference between the rate that a file states and the rate of its frames
_IMAGES = 2.0  # frames per second of a video given as images without a rate


@dataclass(frozen=True)
class Clip:
    """Size, timestamps and frame rate of a clip, known before its frames are decoded."""

    height: int  # of the upright picture
    width: int
    times: tuple[float, ...]  # timestamp of each frame in seconds from the first frame, ascending
    rate: float  # frames per second

    def seconds(self, number: int) -> float:
        """Return a frame's time in seconds: number / rate, or its timestamp if these differ by half a frame or more.

        Containers round timestamps (Matroska to milliseconds); Transformers computes number / rate.
        """
        counted = number / self.rate
        return counted if abs(counted - self.times[number]) < 0.5 / self.rate else self.times[number]

    def between(self, start: float | None, end: float | None) -> slice:
        """Return the numbers of the frames from `start` to `end` in seconds. Raises BadSample if there are none."""
        first = 0 if start is None else bisect_left(self.times, start)
        after = len(self.times) if end is None else bisect_right(self.times, end)
        if first >= after:
            where = f"from {start} to {end} s, and ends at {self.times[-1]:.2f} s"
            raise BadSample(Reason.NO_FRAMES, f"it has no frame {where}")
        return slice(first, after)


@dataclass(frozen=True)
class Budget:
    """Limits for sampling a clip: frames per second, numbers of frames, tokens and pixels, and seconds."""

    fps: float = 2.0  # infinite: as many frames as `max_frames` allows, whatever the clip's length
    max_frames: int = 768
    max_tokens: int | None = None  # None: unlimited, frames have the model's default size
    min_frames: int = 4
    max_pixels: int | None = None  # of a frame; None: the model's
    start: float | None = None  # seconds before which, and after which, nothing is sampled; None: the clip's
    end: float | None = None

    @property
    def rate_of_images(self) -> float:
        """Return the frames per second assumed for a video given as images without a rate."""
        return self.fps if math.isfinite(self.fps) else _IMAGES


def rate_of(times: Sequence[float], stated: float | None) -> float:
    """Return the frames per second of a clip with timestamps `times` (seconds, ascending).

    This is the rate that the file states, unless the timestamps contradict it: for clips with irregular timestamps,
    containers state a nominal rate. A single frame without a stated rate counts as 24 frames per second.
    """
    span = times[-1] - times[0] if times else 0.0
    if span <= 0:
        return stated or 24.0
    own = (len(times) - 1) / span
    # A file's rate counts the last frame's duration, which nothing but the file states: allow for one frame.
    if stated and abs(stated / own - 1) <= _NEAR + 1 / len(times):
        return stated
    return own


def taken(clip: Clip, budget: Budget, places: Places, *, multiple: int = 1) -> tuple[int, ...]:
    """Return the numbers of the frames to sample from a clip, ascending; at least one.

    A clip of n frames at `rate` per second lasts n / rate seconds. Of each second, fps frames are sampled: in total at
    least `min_frames`, at most `max_frames` and n, rounded down to a multiple of `multiple`. `places` spreads them.
    """
    count = len(clip.times)
    most = min(budget.max_frames, count) // multiple * multiple
    wanted = min(max(count / clip.rate * budget.fps, budget.min_frames), most)
    return shown_at(clip, places(count, max(math.floor(wanted / multiple) * multiple, 1)))


def shown_at(clip: Clip, places: Iterable[int]) -> tuple[int, ...]:
    """Return, for each place, the number of the frame with the timestamp nearest to place / rate, without repetitions.

    With frames at equal intervals, each frame number equals its place; else, the places are spaced in time.
    """
    times = clip.times
    return tuple(dict.fromkeys(_nearest(times, times[0] + place / clip.rate) for place in places))


def from_the_first(count: int, frames: int) -> list[int]:
    """Divide `count` frames into `frames` equal parts and return the first frame of each part."""
    return _spaced(0.0, count, frames)


def first_of_parts(count: int, frames: int) -> list[int]:
    """Divide `count` frames into `frames` equal parts and return the first frame of each part, by whole numbers."""
    return [number * count // frames for number in range(frames)]


def in_the_middle(count: int, frames: int) -> list[int]:
    """Divide `count` frames into `frames` equal parts and return the middle frame of each part."""
    return _spaced(count / frames / 2, count, frames)


def from_first_to_last(count: int, frames: int) -> list[int]:
    """Return `frames` evenly spaced frames of `count`, from the first to the last; a single frame is the first."""
    return [int(place) for place in np.linspace(0, count - 1, frames).round()]


def _spaced(first: float, count: int, frames: int) -> list[int]:
    """Return places from `first` on in steps of `count / frames`, computed in fp32 and truncated like the reference."""
    import torch  # not at the top: families, which the planner reads, import this file

    return [int(place) for place in torch.arange(first, count, count / frames).int().tolist()]


def _nearest(times: Sequence[float], moment: float) -> int:
    """Return the number of the frame whose timestamp is nearest to `moment`."""
    after = bisect_left(times, moment)
    if after == 0 or after == len(times):
        return min(after, len(times) - 1)
    return after if times[after] - moment <= moment - times[after - 1] else after - 1


@dataclass(frozen=True, kw_only=True)
class VideoProcessor(ABC):
    """Turns clips into the patches and text that one model expects. A patch spans `frames_per_patch` frames.

    `usual` is the default budget of a run. Chat templates get a video as an image, or, if `as_text`, as the text that
    they write for an image.
    """

    is_bounded: ClassVar[bool] = False  # whether `Budget.max_pixels` has an effect
    patch_size: int
    frames_per_patch: int = 1
    projector: ProjectorConfig
    resample: Resampling
    mean: tuple[float, ...]
    std: tuple[float, ...]
    text: str  # text of the token that a feature replaces
    usual: Budget = field(default_factory=Budget)
    as_text: bool = False

    def layout(self, clip: Clip, budget: Budget) -> Layout:
        """Return frame numbers, tiles and prompt of a clip, without its pixels.

        Raises BadSample for unusable sizes, and if the budget leaves no frames.
        """
        inside = clip.between(budget.start, budget.end)
        part = replace(clip, times=clip.times[inside])
        numbers = tuple(inside.start + number for number in self.numbers(part, self._affordable(budget)))
        size = clip.height, clip.width
        tile = self._tile(*self.frame_size(size, len(numbers), budget))
        arrangement, slices = self.slices(size)
        return Layout(
            size=size,
            tiles=self.tiles((tile, *slices), len(numbers)),
            arrangement=arrangement,
            prompt=self.prompt(clip, numbers, self._tokens(tile)),
            film=Film(
                frames=numbers,
                seconds=tuple(clip.times[number] for number in numbers),
                moments=self.moments(part, numbers),
            ),
        )

    @abstractmethod
    def numbers(self, clip: Clip, budget: Budget) -> tuple[int, ...]:
        """Return the numbers of the frames to sample from a clip, ascending; at least one."""

    @abstractmethod
    def frame_size(self, size: Size, frames: int, budget: Budget) -> Size:
        """Return the (height, width) to which the frames of a clip of `size` are resized."""

    @abstractmethod
    def most_groups(self, tokens: int) -> int:
        """Return the largest number of frame groups that, at their smallest size, fit into `tokens` image tokens."""

    @abstractmethod
    def prompt(self, clip: Clip, numbers: tuple[int, ...], tokens: int) -> Prompt:
        """Return the prompt text of a video with `tokens` features per group of frames."""

    def slices(self, size: Size) -> tuple[Size, tuple[Tile, ...]]:
        """Return (rows, columns) of a frame's additional slices, and the tiles of the slices; default: no slices."""
        return (0, 0), ()

    def tiles(self, group: tuple[Tile, ...], frames: int) -> tuple[Tile, ...]:
        """Return the inputs of the tower for so many frames, given those for a group of them."""
        return group * self.groups(frames)

    def moments(self, clip: Clip, numbers: tuple[int, ...]) -> tuple[int, ...]:
        """Return the time of each group of frames for M-RoPE (`Film.moments`); default: none."""
        return ()

    def frame(self, pixels: Pixels, grid: tuple[int, int]) -> NDArray[np.uint8]:
        """Resize one frame to `grid` (rows, columns) and return its patches [rows·columns, 3, p·p] as bytes."""
        height, width = (side * self.patch_size for side in grid)
        return cells_of(self.resized(pixels, grid)[:height, :width], self.patch_size)

    def resized(self, pixels: Pixels, grid: tuple[int, int]) -> Pixels:
        """Resize the pixels of a frame to the size from `frame_size`, which has this grid of patches."""
        return resize_as_torchvision(pixels, grid[0] * self.patch_size, grid[1] * self.patch_size, self.resample)

    def patches(self, frames: list[NDArray[np.uint8]]) -> Tensor:
        """Return the normalised patches of all groups of frames, [groups·rows·columns, 3·frames_per_patch·p·p]."""
        return normalised(frames, self.frames_per_patch, mean=self.mean, std=self.std)

    def groups(self, frames: int) -> int:
        """Return the number of groups of `frames` frames; the last group is completed by repeating the last frame."""
        return -(-frames // self.frames_per_patch)

    def _affordable(self, budget: Budget) -> Budget:
        """Return the budget with its frames limited to those that fit into `max_tokens`."""
        if budget.max_tokens is None:
            return budget
        most = min(budget.max_frames, max(self.most_groups(budget.max_tokens), 1) * self.frames_per_patch)
        return replace(budget, max_frames=most, min_frames=min(budget.min_frames, most))

    def _tile(self, height: int, width: int) -> Tile:
        return Tile(height, width, (height // self.patch_size, width // self.patch_size))

    def _tokens(self, tile: Tile) -> int:
        return tokens_per_grid(tile.grid, self.projector)
