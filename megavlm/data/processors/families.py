"""What each family does to an image. One class per family: `layout` knows sizes, `views` makes bytes, `tiles` patches.

A processor is a frozen value without state, safe in any thread or worker. Families differ in how they cut; resizing,
normalisation and patches are the same for all.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
from PIL.Image import Resampling
from torch import Tensor

from megavlm.data.anyres import TileGroup, features_of_group
from megavlm.data.bad import BadSample, Reason
from megavlm.data.images import features_of, patchify
from megavlm.data.processors import sizes
from megavlm.data.processors.layout import Layout, Prompt, Tile
from megavlm.data.processors.resize import Pixels, resize
from megavlm.data.processors.sizes import Size
from megavlm.errors import UserError

_MOST_PIXELS = 2**26  # of a picture on the way: 192 MiB


@dataclass(frozen=True, kw_only=True)
class Processor(ABC):
    """Images of one model. `placeholder` is what the family's chat template writes where `Layout.prompt` goes.

    `images` is the number of images in the sample: one family looks closer at an image that is alone.
    """

    patch_size: int
    merge: int = 1  # merge × merge patches become one feature
    resample: Resampling
    mean: tuple[float, ...]
    std: tuple[float, ...]
    placeholder: str = "<image>"
    image_token: str = "<image>"
    fast: bool = False  # resize with torch: some values in a million are off by two, see `resize`

    @abstractmethod
    def layout(self, height: int, width: int, *, images: int = 1) -> Layout:
        """Tiles, features and prompt of an image of this size. Pure. Raises BadSample for sizes that are refused."""

    @abstractmethod
    def views(self, pixels: Pixels, *, images: int = 1) -> list[Pixels]:
        """Pixels of the tiles of `layout`, in its order: bytes [height, width, 3], before normalisation."""

    def tiles(self, pixels: Pixels, *, images: int = 1) -> list[Tensor]:
        """Normalised patches of each tile, [rows·columns, 3·p·p] float32, row-major, as `patchify` defines them."""
        return [self._patches(view) for view in self.views(pixels, images=images)]

    def _resize(self, pixels: Pixels, height: int, width: int) -> Pixels:
        return resize(pixels, height, width, self.resample, fast=self.fast)

    def _patches(self, view: Pixels) -> Tensor:
        rows, columns = self._tile(*view.shape[:2]).grid
        seen = view[: rows * self.patch_size, : columns * self.patch_size]
        return patchify(seen, self.patch_size, mean=self.mean, std=self.std)

    def _tile(self, height: int, width: int) -> Tile:
        return Tile(height, width, (height // self.patch_size, width // self.patch_size))

    def _one_run(self, features: int) -> Prompt:
        return Prompt(self.image_token, ("", ""), (features,))


@dataclass(frozen=True, kw_only=True)
class Whole(Processor):
    """One picture of fixed size: CLIP, SigLIP, LLaVA-1.5.

    Resized to `size`, or so that the shorter side is `edge`; padded before (`pad_to_square`) or cropped after.
    """

    size: Size | None = None
    edge: int | None = None
    crop: Size | None = None
    pad_to_square: bool = False
    class_token: bool = False  # the tower's class token is a feature too

    def layout(self, height: int, width: int, *, images: int = 1) -> Layout:
        resized = self._resized(squared((height, width)) if self.pad_to_square else (height, width))
        tile = self._tile(*(self.crop or resized))
        features = features_of(tile.grid, self.merge) + self.class_token
        return Layout((height, width), (tile,), (0, 0), self._one_run(features))

    def views(self, pixels: Pixels, *, images: int = 1) -> list[Pixels]:
        if self.pad_to_square:
            pixels = pad_to_square(pixels, self.mean)
        picture = self._resize(pixels, *self._resized(pixels.shape[:2]))
        return [picture if self.crop is None else center_crop(picture, self.crop)]

    def _resized(self, size: Size) -> Size:
        if self.edge is None:
            return self.size or size
        return holdable(size, sizes.shortest_edge(size, self.edge))


@dataclass(frozen=True, kw_only=True)
class Anyres(Processor):
    """LLaVA-OneVision: the whole picture, then tiles of the same picture enlarged to the best of some resolutions.

    `megavlm/data/anyres.py` says which features of the tiles are kept. An image among others is only seen whole.
    """

    tile: int
    resolutions: tuple[Size, ...]
    max_tiles: int

    def layout(self, height: int, width: int, *, images: int = 1) -> Layout:
        tile = self._tile(self.tile, self.tile)
        if images > 1:
            squared((height, width))
        arrangement = (0, 0) if images > 1 else self._arrangement((height, width))
        group = TileGroup(arrangement, (height, width))
        try:
            features = features_of_group(group, tile.grid[0], max_tiles=self.max_tiles)
        except UserError as error:  # of this image, so one to leave out
            raise BadSample(Reason.TOO_NARROW, str(error)) from error
        return Layout((height, width), (tile,) * group.tiles, arrangement, self._one_run(features))

    def views(self, pixels: Pixels, *, images: int = 1) -> list[Pixels]:
        if images > 1:
            return [self._whole(pad_to_square(pixels, self.mean))]
        arrangement = self._arrangement(pixels.shape[:2])
        frame = arrangement[0] * self.tile, arrangement[1] * self.tile
        picture = self._resize(pixels, *sizes.fit_inside(pixels.shape[:2], frame))
        return [self._whole(pixels), *cut(pad_evenly(picture, frame), arrangement)]

    def _whole(self, pixels: Pixels) -> Pixels:
        return self._resize(pixels, self.tile, self.tile)

    def _arrangement(self, size: Size) -> Size:
        height, width = sizes.best_resolution(size, self.resolutions)
        return height // self.tile, width // self.tile


@dataclass(frozen=True, kw_only=True)
class Tiled(Processor):
    """InternVL: the picture stretched to the best grid of tiles, then a thumbnail of it where that is more than one."""

    tile: Size
    fewest: int
    most: int
    start: str = "<img>"
    end: str = "</img>"

    def layout(self, height: int, width: int, *, images: int = 1) -> Layout:
        tile = self._tile(*self.tile)
        rows, columns = self._arrangement((height, width))
        tiles = (tile,) * (rows * columns + (rows * columns > 1))
        features = len(tiles) * features_of(tile.grid, self.merge)
        prompt = Prompt(self.image_token, (self.start, self.end), (features,))
        return Layout((height, width), tiles, (rows, columns) if len(tiles) > 1 else (0, 0), prompt)

    def views(self, pixels: Pixels, *, images: int = 1) -> list[Pixels]:
        rows, columns = self._arrangement(pixels.shape[:2])
        picture = self._resize(pixels, self.tile[0] * rows, self.tile[1] * columns)
        if rows * columns == 1:
            return [picture]
        return [*cut(picture, (rows, columns)), self._resize(pixels, *self.tile)]

    def _arrangement(self, size: Size) -> Size:
        return sizes.tile_grid(size, self.tile, fewest=self.fewest, most=self.most)


@dataclass(frozen=True, kw_only=True)
class Native(Processor):
    """Qwen2.5-VL and Qwen3-VL: one picture near its own size. Patches stay row-major and single-frame here."""

    min_pixels: int
    max_pixels: int
    start: str = "<|vision_start|>"
    end: str = "<|vision_end|>"

    def layout(self, height: int, width: int, *, images: int = 1) -> Layout:
        tile = self._tile(*self._resized((height, width)))
        prompt = Prompt(self.image_token, (self.start, self.end), (features_of(tile.grid, self.merge),))
        return Layout((height, width), (tile,), (0, 0), prompt)

    def views(self, pixels: Pixels, *, images: int = 1) -> list[Pixels]:
        return [self._resize(pixels, *self._resized(pixels.shape[:2]))]

    def _resized(self, size: Size) -> Size:
        factor = self.patch_size * self.merge
        return sizes.smart_resize(size, factor=factor, min_pixels=self.min_pixels, max_pixels=self.max_pixels)


@dataclass(frozen=True, kw_only=True)
class Split(Processor):
    """SmolVLM, Idefics3: tiles of the enlarged picture, each announced by its row and column, then the whole of it."""

    edge: int
    tile: int
    split: bool = True
    around: str = "<fake_token_around_image>"
    whole: str = "<global-img>"

    def layout(self, height: int, width: int, *, images: int = 1) -> Layout:
        tile = self._tile(self.tile, self.tile)
        features = features_of(tile.grid, self.merge)
        rows, columns = self._arrangement(sizes.longest_edge((height, width), self.edge))
        texts = []
        for row in range(1, rows + 1):
            for column in range(1, columns + 1):
                line_break = "\n" if column == 1 and row > 1 else ""
                texts.append(f"{line_break}{self.around}<row_{row}_col_{column}>")
        texts.append(("\n\n" if rows else "") + self.around + self.whole)
        prompt = Prompt(self.image_token, (*texts, self.around), (features,) * len(texts))
        return Layout((height, width), (tile,) * len(texts), (rows, columns), prompt)

    def views(self, pixels: Pixels, *, images: int = 1) -> list[Pixels]:
        picture = self._resize(pixels, *sizes.longest_edge(pixels.shape[:2], self.edge))
        rows, columns = self._arrangement(picture.shape[:2])
        if not rows:
            return [self._resize(picture, self.tile, self.tile)]
        picture = self._resize(picture, rows * self.tile, columns * self.tile)
        return [*cut(picture, (rows, columns)), self._resize(picture, self.tile, self.tile)]

    def _arrangement(self, size: Size) -> Size:
        """(rows, columns) of tiles for an enlarged picture; (0, 0) where one tile holds it."""
        grid = sizes.whole_tiles(size, self.tile) if self.split else (1, 1)
        return (0, 0) if grid == (1, 1) else grid


def cut(picture: Pixels, arrangement: Size) -> list[Pixels]:
    """Equal tiles, row by row; views, nothing is copied."""
    rows, columns = arrangement
    height, width = picture.shape[0] // rows, picture.shape[1] // columns
    return [
        picture[row * height : (row + 1) * height, column * width : (column + 1) * width]
        for row in range(rows)
        for column in range(columns)
    ]


def center_crop(picture: Pixels, size: Size) -> Pixels:
    """The middle of a picture; where it is smaller than `size`, in the middle of black, an odd pixel above or left."""
    top, left = (picture.shape[0] - size[0]) // 2, (picture.shape[1] - size[1]) // 2
    inside = picture[max(top, 0) :, max(left, 0) :][: size[0], : size[1]]
    return pasted(inside, size, at=(max(-top, 0), max(-left, 0)))


def pad_evenly(picture: Pixels, size: Size) -> Pixels:
    """The picture in the middle of black, an odd pixel below or right."""
    return pasted(picture, size, at=((size[0] - picture.shape[0]) // 2, (size[1] - picture.shape[1]) // 2))


def pad_to_square(picture: Pixels, mean: tuple[float, ...]) -> Pixels:
    """The picture in the middle of a square of the mean colour, an odd pixel below or right."""
    size = squared(picture.shape[:2])
    at = (size[0] - picture.shape[0]) // 2, (size[1] - picture.shape[1]) // 2
    return pasted(picture, size, at=at, colour=tuple(int(value * 255) for value in mean))


def pasted(picture: Pixels, size: Size, *, at: Size, colour: tuple[int, ...] = (0, 0, 0)) -> Pixels:
    height, width = picture.shape[:2]
    if (height, width) == size:
        return picture
    canvas = np.empty((*size, 3), np.uint8)
    canvas[:] = colour
    canvas[at[0] : at[0] + height, at[1] : at[1] + width] = picture
    return canvas


def squared(size: Size) -> Size:
    return holdable(size, (max(size), max(size)))


def holdable(size: Size, picture: Size) -> Size:
    """`picture`, what an image of `size` would become on the way; a hair of 1×10000 pixels may become gigabytes.

    Raises BadSample then.
    """
    if picture[0] * picture[1] > _MOST_PIXELS:
        raise BadSample(
            Reason.TOO_NARROW, f"{size[0]}×{size[1]} pixels would become {picture[0]}×{picture[1]} on the way"
        )
    return picture
