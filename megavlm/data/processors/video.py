"""`VideoProcessor`: prepare the frames of a clip for a model. `layout` computes sizes, `patches` pixels."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

from PIL.Image import Resampling

from megavlm.config.schema import ProjectorConfig
from megavlm.data.images import patchify, spanning
from megavlm.data.processors.layout import Layout, Tile
from megavlm.data.processors.resize import Pixels, resize_as_torchvision
from megavlm.data.processors.sampling import Budget, Clip

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class VideoProcessor(ABC):
    """Turns clips into the patches and text that one model expects. A patch spans `frames_per_patch` frames."""

    patch_size: int
    frames_per_patch: int
    projector: ProjectorConfig
    resample: Resampling
    mean: tuple[float, ...]
    std: tuple[float, ...]
    text: str  # how the tokenizer writes the token that a feature takes the place of

    @abstractmethod
    def layout(self, clip: Clip, budget: Budget) -> Layout:
        """Return frames, tiles and prompt of a clip, without its pixels. Raises BadSample for unusable sizes."""

    def frame(self, pixels: Pixels, grid: tuple[int, int]) -> Tensor:
        """Return the normalised patches [rows·columns, 3·p·p] of one frame, resized to (rows, columns) of patches."""
        height, width = (side * self.patch_size for side in grid)
        resized = resize_as_torchvision(pixels, height, width, self.resample)
        return patchify(resized, self.patch_size, mean=self.mean, std=self.std)

    def patches(self, frames: list[Tensor]) -> Tensor:
        """Return the patches of all groups of frames, [groups·rows·columns, 3·frames_per_patch·p·p]."""
        return spanning(frames, self.frames_per_patch, channels=3)

    def _tile(self, height: int, width: int) -> Tile:
        return Tile(height, width, (height // self.patch_size, width // self.patch_size))
