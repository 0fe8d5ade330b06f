"""The features of an image's tiles as one map, row by row (LLaVA-OneVision). `megavlm/data/anyres.py` says which."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from megavlm.data.anyres import TileGroup, feature_map


def lay_out(
    features: Tensor, groups: Sequence[TileGroup], counts: Sequence[int], *, newline: Tensor, max_tiles: int
) -> Tensor:
    """Tiles' features [Σ counts, H] → images' features [F, H], newlines [H] included.

    Args:
        counts: features of each tile.
    """
    tiles = iter(features.split(list(counts)))
    images: list[Tensor] = []
    for group in groups:
        base = next(tiles)
        images.append(base)
        if group.tiles == 1:
            images.append(newline[None])
        else:
            grid = torch.stack([next(tiles) for _ in range(group.tiles - 1)])
            images.append(_lines(grid, group, newline=newline, max_tiles=max_tiles))
    return torch.cat(images)


def _lines(grid: Tensor, group: TileGroup, *, newline: Tensor, max_tiles: int) -> Tensor:
    """Features [tiles, side², H] of a grid → [height · (width + 1), H]."""
    side = round(grid.shape[1] ** 0.5)
    kept = feature_map(group, side, max_tiles=max_tiles)
    cells = grid.view(*group.grid, side, side, -1).transpose(1, 2)  # tile row, row in it, tile column, column in it, H
    whole = cells.flatten(2, 3).flatten(0, 1)[kept.rows, kept.columns]
    if whole.shape[:2] != (kept.height, kept.width):
        channels_first = whole.permute(2, 0, 1)[None]
        reduced = F.interpolate(channels_first, (kept.height, kept.width), mode="bilinear", align_corners=False)
        whole = reduced[0].permute(1, 2, 0)
    return torch.cat([whole, newline.expand(kept.height, 1, -1)], dim=1).flatten(0, 1)
