"""Windows of a patch grid (Qwen2.5-VL): most vision layers attend inside a window only, a few over the whole image.

Patches of a window follow each other inside the tower, so that a window is a sequence like any other. Windows of equal
size follow each other too, over all images: attention then runs as one batched call per size, of which an image has at
most four (inside, right edge, lower edge, corner). Attention does not depend on the order of its sequences, nor on the
order within one, so any order that keeps windows together gives the same numbers. The few layers that attend over whole
images take their tokens image by image.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

Grid = tuple[int, int]


@lru_cache(maxsize=256)
def window_order(grid: Grid, side: int) -> tuple[Tensor, tuple[int, ...]]:
    """Tile a grid with windows of `side` × `side` patches from its upper left corner.

    Returns:
        ([rows·columns] int64: the row-major patch that stands at each place of the tower's order,
        patches of each window in that order).
    """
    tiles = {
        (row, column): (min(side, grid[0] - row), min(side, grid[1] - column))
        for row in range(0, grid[0], side)
        for column in range(0, grid[1], side)
    }
    patches = torch.arange(grid[0] * grid[1]).view(grid)
    corners = sorted(tiles, key=lambda corner: tiles[corner], reverse=True)
    spans = [patches[r : r + tiles[r, c][0], c : c + tiles[r, c][1]].flatten() for r, c in corners]
    return torch.cat(spans), tuple(len(span) for span in spans)


def joint_window_order(grids: Sequence[Grid], side: int) -> tuple[Tensor, tuple[int, ...]]:
    """The same for images one after the other, windows of most patches first, those of equal number together."""
    orders: list[Tensor] = []
    lengths: list[int] = []
    start = 0
    for grid in grids:
        order, of_windows = window_order(grid, side)
        orders.append(order + start)
        lengths += of_windows
        start += len(order)
    counts = torch.tensor(lengths)
    place = counts.repeat_interleave(counts).argsort(descending=True, stable=True)
    return torch.cat(orders)[place], tuple(sorted(lengths, reverse=True))
