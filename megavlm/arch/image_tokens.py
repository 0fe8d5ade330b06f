"""Number of tokens of an image or a sound, for the model, the data, the planner and the image processors.

An image is one or more grids of patches (its tiles, if the model cuts images into tiles). The projector turns each grid
into features, and each feature takes the place of one image token. `tokens_per_grid` says how many features a grid has;
`tokens_per_image` says how many image tokens remain of an image's tiles.

Images of any size as tiles of one size ("anyres"; LLaVA-NeXT, LLaVA-OneVision): an image becomes a base tile, which is
the whole image at the tower's size, and a grid of tiles, which show it enlarged with its aspect ratio kept, centred and
padded on two opposite sides. The grid's features form one map, which loses its padding and is reduced if it is larger
than `max_tiles` tiles; each of its rows ends with a newline. The base tile's features come first. An image of a base
tile alone ends with one newline. A frame of a video is one tile, whose features are resized to half their side, and one
newline ends the video. `megavlm/model/vision_ops.py` arranges the features. All of it is as in Transformers'
LlavaOnevision.

A sound of n mel frames, 100 a second, is cut into chunks. A convolution with a stride of two turns a chunk into
positions, which attend to one another within a window of chunks. The mean of every two positions is a feature: 25 a
second. Three convolutions with strides of two make a position, and a feature, of eight frames.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from megavlm.config.registry import registered
from megavlm.config.schema import AudioConfig, ProjectorConfig
from megavlm.errors import UserError

# (height, width) of an image in pixels → (rows, columns) of the tiles of its grid.
Tiling = Callable[[tuple[int, int]], tuple[int, int]]

# Maps whose sides would shrink by no more than this factor are left as they are.
_TOLERATED = 1.1

BLANK = 4  # mel frames of the silence that a micro-batch without sounds sends through the encoder


@dataclass(frozen=True)
class TileGroup:
    """Consecutive tiles of a micro-batch that are one image: the base tile, then the tiles of the grid, row by row.

    A frame of a video is a group of one tile; `kind` says whether it is the last frame.
    """

    grid: tuple[int, int]  # (rows, columns) of tiles; (0, 0) if the image has only its base tile
    size: tuple[int, int]  # (height, width) of the image in pixels, as it was before tiling
    kind: Literal["image", "frame", "last frame"] = "image"

    @property
    def tiles(self) -> int:
        """Return the number of tiles, the base tile included."""
        return 1 + self.grid[0] * self.grid[1]


@dataclass(frozen=True)
class FeatureMap:
    """Features of a grid of tiles that become image tokens: `rows` and `columns`, resized to `height` × `width`."""

    rows: slice
    columns: slice
    height: int
    width: int


def feature_map(group: TileGroup, side: int, *, max_tiles: int) -> FeatureMap:
    """Return the part of the features of a grid of tiles that shows the image. Each tile has `side` × `side` features.

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
    """Return the number of image tokens of one image, newlines included. Each tile has `side` × `side` features."""
    if group.kind != "image":
        return half(side) ** 2 + (group.kind == "last frame")
    if group.tiles == 1:
        return side**2 + 1
    kept = feature_map(group, side, max_tiles=max_tiles)
    return side**2 + kept.height * (kept.width + 1)


def half(side: int) -> int:
    """Return the side of the features of a video frame after resizing, from their side before."""
    return -(-side // 2)


# (rows, columns) of patches; (rows, columns, frames) of a chunk of a video, whose frames attend to one another.
Grid = tuple[int, ...]


def _connector(projector: ProjectorConfig) -> Any:
    """Return the connector. It is untyped because its module imports this one."""
    return registered("connectors")[projector.kind]


def grid_of(height: int, width: int, patch_size: int) -> tuple[int, int]:
    """Return the grid of patches of an image, from its sides in pixels.

    Raises UserError when a side is not a positive multiple of the patch.
    """
    if height < 1 or width < 1 or height % patch_size or width % patch_size:
        raise UserError(
            f"an image of {height}×{width} pixels cannot be cut into patches of {patch_size}: "
            f"choose sides that are multiples of model.vision.patch_size {patch_size}"
        )
    return height // patch_size, width // patch_size


def smallest_grid(projector: ProjectorConfig) -> Grid:
    """Return the smallest grid of patches that has a feature, for the blank image of batches without images."""
    return _connector(projector).smallest_grid(projector)


def tokens_per_grid(grid: Grid, projector: ProjectorConfig) -> int:
    """Return the number of features of a grid of patches; those of a chunk are means over its frames.

    Raises UserError if it has none.
    """
    return _connector(projector).tokens_per_grid(grid[:2], projector)


def tokens_per_image(grids: Sequence[Grid], groups: Sequence[TileGroup], projector: ProjectorConfig) -> list[int]:
    """Return the number of image tokens of each image.

    Args:
        grids: rows and columns of patches of each image, tile or frame, in the order of the tower's inputs.
        groups: for each image, how many consecutive grids are its tiles; empty if the model does not cut images
            into tiles, so that each grid is an image.
    """
    features = [tokens_per_grid(grid, projector) for grid in grids]
    if projector.anyres_max_tiles is None:
        assert not groups, "the model does not take tiled images"
        return features
    assert sum(group.tiles for group in groups) == len(grids), "every tile belongs to one image"
    assert all(grid == (grids[0][0], grids[0][0]) for grid in grids), "tiles are square and of one size"
    side = math.isqrt(features[0]) if features else 0
    return [tokens_per_tiled_image(group, side, max_tiles=projector.anyres_max_tiles) for group in groups]


def chunk_lengths(frames: int, chunk: int) -> list[int]:
    """Return the lengths of the chunks of a sound in mel frames, of which only the last may be shorter."""
    return [min(chunk, frames - start) for start in range(0, frames, chunk)]


def positions_of(frames: int, audio: AudioConfig) -> int:
    """Return the number of positions of a sound, or of its part from the beginning of a chunk on."""
    stride = 2 if audio.conv_channels is None else 8
    return sum(-(-length // stride) for length in chunk_lengths(frames, audio.chunk_frames))


def windows_of(frames: int, audio: AudioConfig) -> list[int]:
    """Return the numbers of positions of a sound that attend to one another: those of so many chunks."""
    windows = chunk_lengths(frames, audio.chunk_frames * audio.window_chunks)
    return [positions_of(length, audio) for length in windows]


def features_of(frames: int, audio: AudioConfig) -> int:
    """Return the number of features (= audio tokens) of a sound; of two positions each, one left over has none."""
    return positions_of(frames, audio) // (2 if audio.conv_channels is None else 1)
