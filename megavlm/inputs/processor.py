"""`Processor`: prepare images for a model. `layout` computes sizes, `views` pixels, `tiles` patches.

A processor is frozen and stateless, so threads and workers can share it. Families with a tiling rule of their own have
a subclass in their file (`megavlm/families`); resizing, normalisation and patches are the same for all.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from PIL.Image import Resampling

from megavlm.arch.image_tokens import tokens_per_grid
from megavlm.config.schema import ProjectorConfig
from megavlm.inputs.bad_sample import BadSample, Reason
from megavlm.inputs.layout import Layout, Prompt, Tile
from megavlm.inputs.patches import patchify
from megavlm.inputs.resize import Pixels, Size, resize, shortest_edge
from megavlm.inputs.sounds import SoundProcessor
from megavlm.inputs.video import VideoProcessor
from megavlm.inputs.vision_inputs import RGB, VisionInput

if TYPE_CHECKING:  # families are read where torch is not needed, as by the planner
    from torch import Tensor

MOST_PIXELS = 2**26  # of a resized image before it is cropped: 192 MiB


@dataclass(frozen=True, kw_only=True)
class Processor(ABC):
    """Turns the images of one model into patches and text.

    `placeholder` is what the chat template writes and `Layout.prompt` replaces. `images` is the number of images in
    the sample: some models cut an image into tiles only if it is the sample's only one.
    """

    anyres: ClassVar[bool] = False  # whether an image's tiles form one feature map (`megavlm/arch/image_tokens.py`)
    whole_first: ClassVar[bool] = False  # whether a tile of the whole image precedes the others, not follows them

    patch_size: int
    projector: ProjectorConfig  # decides how many image tokens a tile becomes
    resample: Resampling
    mean: tuple[float, ...]
    std: tuple[float, ...]
    placeholder: str = "<image>"
    image_token: str = "<image>"
    fast: bool = False  # resize with torch: some values in a million are off by two, see `resize`
    video: VideoProcessor | None = None  # None: the model's videos are not known here
    sounds: SoundProcessor | None = None  # None: the model takes no audio
    vision_input: VisionInput = RGB  # the content of files, and the channels that the model gets

    @abstractmethod
    def layout(self, height: int, width: int, *, images: int = 1) -> Layout:
        """Return the tiles and the prompt of an image from its size alone. Raises BadSample for unusable sizes."""

    @abstractmethod
    def views(self, pixels: Pixels, *, images: int = 1) -> list[Pixels]:
        """Return the pixels [height, width, C] of each tile, in the order of `layout`, before normalisation."""

    def numbered(self, layout: Layout, number: int) -> Layout:
        """Return the layout with the image's `number` in the sample (from 0), for models that write it in the prompt.

        The images and the videos of a sample are numbered separately.
        """
        return layout

    def tiles(self, pixels: Pixels, *, images: int = 1) -> list[Tensor]:
        """Return the normalised patches of each tile, [rows·columns, C·p·p] float32, row-major, as `patchify` does."""
        return [self._patches(view) for view in self.views(pixels, images=images)]

    def _resize(self, pixels: Pixels, height: int, width: int) -> Pixels:
        return resize(pixels, height, width, self.resample, fast=self.fast)

    def _patches(self, view: Pixels) -> Tensor:
        rows, columns = self._tile(*view.shape[:2]).grid
        seen = view[: rows * self.patch_size, : columns * self.patch_size]
        if self.vision_input.make is not None:
            seen = self.vision_input.make(seen)
        return patchify(seen, self.patch_size, mean=self.mean, std=self.std)

    def _tile(self, height: int, width: int) -> Tile:
        return Tile(height, width, (height // self.patch_size, width // self.patch_size))

    def _one_run(self, features: int) -> Prompt:
        return Prompt(self.image_token, ("", ""), (features,))


@dataclass(frozen=True, kw_only=True)
class Whole(Processor):
    """Processor that does not tile images (CLIP, SigLIP, LLaVA-1.5).

    The image is resized to `size`, or so that its shorter side is `edge`. Optionally it is padded to a square before
    (`pad_to_square`) or cropped to `crop` afterwards.
    """

    size: Size | None = None
    edge: int | None = None
    crop: Size | None = None
    pad_to_square: bool = False

    def layout(self, height: int, width: int, *, images: int = 1) -> Layout:
        resized = self._resized(squared((height, width)) if self.pad_to_square else (height, width))
        tile = self._tile(*(self.crop or resized))
        return Layout((height, width), (tile,), (0, 0), self._one_run(tokens_per_grid(tile.grid, self.projector)))

    def views(self, pixels: Pixels, *, images: int = 1) -> list[Pixels]:
        if self.pad_to_square:
            pixels = pad_to_square(pixels, self.mean)
        picture = self._resize(pixels, *self._resized(pixels.shape[:2]))
        return [picture if self.crop is None else center_crop(picture, self.crop)]

    def _resized(self, size: Size) -> Size:
        if self.edge is None:
            return self.size or size
        return holdable(size, shortest_edge(size, self.edge))


def cut(picture: Pixels, arrangement: Size) -> list[Pixels]:
    """Cut an image into a grid of equal tiles; return them row by row, as views of the same memory."""
    rows, columns = arrangement
    height, width = picture.shape[0] // rows, picture.shape[1] // columns
    return [
        picture[row * height : (row + 1) * height, column * width : (column + 1) * width]
        for row in range(rows)
        for column in range(columns)
    ]


def center_crop(picture: Pixels, size: Size) -> Pixels:
    """Crop the centre of an image; pad a smaller image with black, an odd row at the top, an odd column at the left."""
    top, left = (picture.shape[0] - size[0]) // 2, (picture.shape[1] - size[1]) // 2
    inside = picture[max(top, 0) :, max(left, 0) :][: size[0], : size[1]]
    return pasted(inside, size, at=(max(-top, 0), max(-left, 0)))


def pad_evenly(picture: Pixels, size: Size) -> Pixels:
    """Pad an image with black to `size`, centred; an odd row is at the bottom, an odd column at the right."""
    return pasted(picture, size, at=((size[0] - picture.shape[0]) // 2, (size[1] - picture.shape[1]) // 2))


def pad_to_square(picture: Pixels, mean: tuple[float, ...]) -> Pixels:
    """Pad an image with the mean colour to a square, centred; the odd row or column is at the bottom or the right."""
    size = squared(picture.shape[:2])
    at = (size[0] - picture.shape[0]) // 2, (size[1] - picture.shape[1]) // 2
    # `mean` has the means of the RGB channels first, then the means of channels computed from RGB.
    means = mean[: picture.shape[2]]
    colour = tuple(int(value * 255) for value in means) if picture.dtype == np.uint8 else means
    return pasted(picture, size, at=at, colour=colour)


def pasted(picture: Pixels, size: Size, *, at: Size, colour: tuple[float, ...] = (0,)) -> Pixels:
    """Paste an image at (top, left) `at` on a canvas of `size` in one colour; return an image of `size` as it is."""
    height, width = picture.shape[:2]
    if (height, width) == size:
        return picture
    canvas = np.empty((*size, picture.shape[2]), picture.dtype)
    canvas[:] = colour
    canvas[at[0] : at[0] + height, at[1] : at[1] + width] = picture
    return canvas


def squared(size: Size) -> Size:
    """Return the size of the smallest square around an image of `size`. Raises BadSample if it is too large."""
    return holdable(size, (max(size), max(size)))


def holdable(size: Size, picture: Size) -> Size:
    """Return `picture`, the size to which an image of `size` is resized or padded.

    Raises BadSample if `picture` is too large: a line of 1×10000 pixels would need gigabytes.
    """
    if picture[0] * picture[1] > MOST_PIXELS:
        raise BadSample(
            Reason.TOO_NARROW, f"{size[0]}×{size[1]} pixels would be resized or padded to {picture[0]}×{picture[1]}"
        )
    return picture
