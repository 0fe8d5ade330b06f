"""Images of any size as tiles of one size ("anyres"; LLaVA-NeXT, LLaVA-OneVision): which features become image tokens.

An image comes as a base tile, which is all of it at the tower's size, and a grid of tiles that show it enlarged, its
shape kept, in the middle, padded on two opposite sides. The grid's features form one map. It loses its padding, is
reduced where it is larger than `max_tiles` tiles, and each of its rows ends with a newline. The base tile's features
come first. An image whose base tile is all there is ends with one newline.

A frame of a video is one tile. Its features are resized to half as many a side, and one newline ends the video. Image
tokens are counted here, and features are arranged in `megavlm/model/vision_ops.py`; both as in Transformers'
LlavaOnevision.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from megavlm.errors import UserError

# (height, width) of an image in pixels → (rows, columns) of the tiles of its grid.
Tiling = Callable[[tuple[int, int]], tuple[int, int]]

# Maps whose sides would shrink by no more than this are left as they are.
_TOLERATED = 1.1


@dataclass(frozen=True)
class TileGroup:
    """Consecutive tiles of a micro-batch that are one image: its base tile, then the tiles of its grid, row by row.

    Or one tile that is a frame of a video, and maybe the video's last.
    """

    grid: tuple[int, int]  # (rows, columns) of tiles; (0, 0) if the image has only its base tile
    size: tuple[int, int]  # (height, width) of the image in pixels, as it was before tiling
    kind: Literal["image", "frame", "last frame"] = "image"

    @property
    def tiles(self) -> int:
        return 1 + self.grid[0] * self.grid[1]


@dataclass(frozen=True)
class FeatureMap:
    """Features of a grid of tiles that become image tokens: these rows and columns, resized to `height` × `width`."""

    rows: slice
    columns: slice
    height: int
    width: int


def feature_map(group: TileGroup, side: int, *, max_tiles: int) -> FeatureMap:
    """Return the part of `group`'s grid of tiles that shows the image. Each tile has `side` × `side` features.

    An image that is wider than its grid fills the grid's width W and, in the middle, W · height / width of its rows;
    the others are padding. A taller one fills the grid's height. With r = √(features kept / (max_tiles · side²)), both
    sides then shrink r times.

    Raises UserError for an image so narrow that shrinking leaves nothing of it.
    """
    rows, columns = group.grid[0] * side, group.grid[1] * side
    height, width = group.size
    top = left = 0
    if width / height > columns / rows:
        top = (rows - int(round(height * (columns / width), 7))) // 2
    else:
        left = (columns - int(round(width * (rows / height), 7))) // 2
    kept_rows, kept_columns = rows - 2 * top, columns - 2 * left
    ratio = math.sqrt(kept_rows * kept_columns / (max_tiles * side**2))
    shrink = ratio if ratio > _TOLERATED else 1
    reduced = int(kept_rows // shrink), int(kept_columns // shrink)
    if shrink > 1 and 0 in reduced:
        raise UserError(
            f"an image of {height}×{width} pixels is too narrow for model.projector.anyres_max_tiles {max_tiles}: "
            "leave it out"
        )
    return FeatureMap(slice(top, top + kept_rows), slice(left, left + kept_columns), *reduced)


def tokens_per_tiled_image(group: TileGroup, side: int, *, max_tiles: int) -> int:
    """Return the image tokens of one image, newlines included. Each tile has `side` × `side` features."""
    if group.kind != "image":
        return half(side) ** 2 + (group.kind == "last frame")
    if group.tiles == 1:
        return side**2 + 1
    kept = feature_map(group, side, max_tiles=max_tiles)
    return side**2 + kept.height * (kept.width + 1)


def half(side: int) -> int:
    """Return the side of a frame's features after resizing."""
    return -(-side // 2)
