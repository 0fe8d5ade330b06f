"""`VideoProcessor`: prepare the frames of a clip for a model. `layout` computes sizes, `patches` pixels.

A family's own is a subclass: it says which frames it takes, how large they are, and what its text says of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from PIL.Image import Resampling

from megavlm.arch.image_tokens import tokens_per_grid
from megavlm.config.schema import ProjectorConfig
from megavlm.inputs.layout import Film, Layout, Prompt, Tile
from megavlm.inputs.patches import cells_of, normalised
from megavlm.inputs.resize import Pixels, resize_as_torchvision
from megavlm.inputs.sampling import Budget, Clip
from megavlm.inputs.sizes import Size

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class VideoProcessor(ABC):
    """Turns clips into the patches and text that one model expects. A patch spans `frames_per_patch` frames.

    `usual` is the budget of a run that says nothing of frames. Chat templates get a video as an image, or, if
    `as_text`, as the text that they write for an image.
    """

    patch_size: int
    frames_per_patch: int = 1
    projector: ProjectorConfig
    resample: Resampling
    mean: tuple[float, ...]
    std: tuple[float, ...]
    text: str  # how the tokenizer writes the token that a feature takes the place of
    usual: Budget = field(default_factory=Budget)
    as_text: bool = False

    def layout(self, clip: Clip, budget: Budget) -> Layout:
        """Return frames, tiles and prompt of a clip, without its pixels. Raises BadSample for unusable sizes."""
        numbers = self.numbers(clip, self._affordable(budget))
        tile = self._tile(*self.frame_size((clip.height, clip.width), len(numbers), budget))
        return Layout(
            size=(clip.height, clip.width),
            tiles=(tile,) * self.groups(len(numbers)),
            arrangement=(0, 0),
            prompt=self.prompt(clip, numbers, self._tokens(tile)),
            film=Film(
                frames=numbers,
                seconds=tuple(clip.times[number] for number in numbers),
                moments=self.moments(clip, numbers),
            ),
        )

    @abstractmethod
    def numbers(self, clip: Clip, budget: Budget) -> tuple[int, ...]:
        """Return the numbers of the frames that are taken of a clip, rising; at least one."""

    @abstractmethod
    def frame_size(self, size: Size, frames: int, budget: Budget) -> Size:
        """Return the (height, width) to which the frames of a clip of `size` are resized."""

    @abstractmethod
    def most_groups(self, tokens: int) -> int:
        """Return how many groups of frames have no more than `tokens` image tokens at their least size."""

    @abstractmethod
    def prompt(self, clip: Clip, numbers: tuple[int, ...], tokens: int) -> Prompt:
        """Return the text of a video whose groups of frames have `tokens` features each."""

    def moments(self, clip: Clip, numbers: tuple[int, ...]) -> tuple[int, ...]:
        """Return `Film.moments`."""
        return ()

    def frame(self, pixels: Pixels, grid: tuple[int, int]) -> NDArray[np.uint8]:
        """Return the patches [rows·columns, 3, p·p] of one frame, resized to (rows, columns) of patches, as bytes."""
        height, width = (side * self.patch_size for side in grid)
        return cells_of(self.resized(pixels, grid)[:height, :width], self.patch_size)

    def resized(self, pixels: Pixels, grid: tuple[int, int]) -> Pixels:
        """Return the pixels of a frame at the size that `frame_size` returned, which has this grid of patches."""
        return resize_as_torchvision(pixels, grid[0] * self.patch_size, grid[1] * self.patch_size, self.resample)

    def patches(self, frames: list[NDArray[np.uint8]]) -> Tensor:
        """Return the normalised patches of all groups of frames, [groups·rows·columns, 3·frames_per_patch·p·p]."""
        return normalised(frames, self.frames_per_patch, mean=self.mean, std=self.std)

    def groups(self, frames: int) -> int:
        """Return how many groups so many frames make; the last frame fills the last group."""
        return -(-frames // self.frames_per_patch)

    def _affordable(self, budget: Budget) -> Budget:
        """Return a budget of no more frames than its tokens suffice for."""
        if budget.max_tokens is None:
            return budget
        most = min(budget.max_frames, max(self.most_groups(budget.max_tokens), 1) * self.frames_per_patch)
        return replace(budget, max_frames=most, min_frames=min(budget.min_frames, most))

    def _tile(self, height: int, width: int) -> Tile:
        return Tile(height, width, (height // self.patch_size, width // self.patch_size))

    def _tokens(self, tile: Tile) -> int:
        return tokens_per_grid(tile.grid, self.projector)
