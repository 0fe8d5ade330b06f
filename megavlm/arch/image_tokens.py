"""Count the image tokens of an image: the one answer that model, data, planner and image processors share.

An image is one or more grids of patches (its tiles, if the model cuts images into tiles). The projector turns each grid
into features, and each feature takes the place of one image token. `tokens_per_grid` says how many features a grid has;
`tokens_per_image` says how many image tokens remain of an image's tiles.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from megavlm.arch.anyres import TileGroup, tokens_per_tiled_image
from megavlm.config.registry import registered
from megavlm.config.schema import ProjectorConfig
from megavlm.errors import UserError

Grid = tuple[int, int]  # (rows, columns) of patches


def grid_of(height: int, width: int, patch_size: int) -> Grid:
    """Return the grid of patches of an image whose sides are in pixels.

    Raises UserError when a side is not a positive multiple of the patch.
    """
    if height < 1 or width < 1 or height % patch_size or width % patch_size:
        raise UserError(
            f"an image of {height}×{width} pixels cannot be cut into patches of {patch_size}: "
            f"choose sides that are multiples of model.vision.patch_size {patch_size}"
        )
    return height // patch_size, width // patch_size


def smallest_grid(projector: ProjectorConfig) -> Grid:
    """Return the fewest patches that have a feature: the grid of the blank image of batches without images."""
    connector: Any = registered("connectors")[projector.kind]  # a `Connector`, whose module needs this one
    grid: Grid = connector.smallest_grid(projector)
    return grid


def tokens_per_grid(grid: Grid, projector: ProjectorConfig) -> int:
    """Return the number of features of a grid of patches. Raises UserError for a grid that has none."""
    connector: Any = registered("connectors")[projector.kind]
    count: int = connector.tokens_per_grid(grid, projector)
    return count


def tokens_per_image(grids: Sequence[Grid], groups: Sequence[TileGroup], projector: ProjectorConfig) -> list[int]:
    """Return the number of image tokens of each image.

    Args:
        grids: patches of all that the tower sees, in order.
        groups: which consecutive grids are the tiles of one image; empty if the model does not cut images into tiles,
            so that each grid is an image.
    """
    features = [tokens_per_grid(grid, projector) for grid in grids]
    if projector.anyres_max_tiles is None:
        assert not groups, "the model does not take tiled images"
        return features
    assert sum(group.tiles for group in groups) == len(grids), "every tile belongs to one image"
    assert all(grid == (grids[0][0], grids[0][0]) for grid in grids), "tiles are square and of one size"
    side = math.isqrt(features[0]) if features else 0
    return [tokens_per_tiled_image(group, side, max_tiles=projector.anyres_max_tiles) for group in groups]
