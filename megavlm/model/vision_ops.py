"""Operations on patches and features of images: windows, pixel shuffle, tiles. The module needs torch alone."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor

from megavlm.arch.image_tokens import Grid, TileGroup, feature_map, half

# Windows (Qwen2.5-VL): most vision layers attend inside a window only, a few over the whole image. The patches of a
# window are consecutive inside the tower, so a window is a sequence like any other. Windows of equal size are
# consecutive too, over all images, so attention is one batched call per size, of which an image has at most four
# (inside, right edge, lower edge, corner). Attention depends neither on the order of sequences nor on the order within
# one, so any order that keeps windows together gives the same numbers. Layers that attend over whole images reorder
# their tokens image by image.


@lru_cache(maxsize=256)
def window_order(grid: Grid, side: int) -> tuple[Tensor, tuple[int, ...]]:
    """Return the order of a grid's patches by windows of `side` × `side` patches, cut from the upper left corner on.

    Returns:
        ([rows·columns] int64: the row-major index of the patch at each place of the tower's order,
        number of patches of each window in that order).
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
    """Return the window order of consecutive images, largest windows first and windows of one size together."""
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


def mean_over_frames(patches: Tensor, grids: tuple[Grid, ...]) -> tuple[Tensor, tuple[Grid, ...]]:
    """Return the patches [P, H] of images and the means over the frames of chunks (`Grid`), and their grids."""
    if all(len(grid) == 2 for grid in grids):
        return patches, grids
    pieces = zip(grids, patches.split([math.prod(grid) for grid in grids]), strict=True)
    means = [piece.unflatten(0, (-1, grid[0] * grid[1])).mean(0) for grid, piece in pieces]
    return torch.cat(means), tuple(grid[:2] for grid in grids)


def pixel_shuffle(patches: Tensor, grids: tuple[Grid, ...], factor: int) -> Tensor:
    """Return each factor × factor block of neighbouring patches as one vector: [P, H] → [P/factor², H·factor²].

    Blocks are in row-major order, and inside a block (row, column, channel).
    """
    return torch.cat([blocks.transpose(1, 2).flatten(2).flatten(0, 1) for blocks in _blocks(patches, grids, factor)])


def channels_first_blocks(patches: Tensor, grids: tuple[Grid, ...], factor: int) -> Tensor:
    """Return `pixel_shuffle` in the order (channel, row, column) inside a block, as convolution weights have it."""
    return torch.cat(
        [blocks.permute(0, 2, 4, 1, 3).flatten(2).flatten(0, 1) for blocks in _blocks(patches, grids, factor)]
    )


def average_pool(patches: Tensor, grids: tuple[Grid, ...], factor: int) -> Tensor:
    """Return the mean of each factor × factor block of neighbouring patches: [P, H] → [P/factor², H], row-major."""
    return torch.cat([blocks.mean(dim=(1, 3)).flatten(0, 1) for blocks in _blocks(patches, grids, factor)])


def _blocks(patches: Tensor, grids: tuple[Grid, ...], factor: int) -> Iterator[Tensor]:
    """Yield each image as [rows/factor, factor, columns/factor, factor, H], without patches that fill no block."""
    for (rows, columns), image in zip(grids, patches.split([r * c for r, c in grids]), strict=True):
        high, wide = rows // factor, columns // factor
        whole = image.view(rows, columns, -1)[: high * factor, : wide * factor]
        yield whole.unflatten(1, (wide, factor)).unflatten(0, (high, factor))


def images_of(patches: Tensor, grids: Sequence[Grid]) -> Iterator[Tensor]:
    """Yield patches [P, H] as [images, rows, columns, H], consecutive images of one size in one tensor."""
    start = 0
    for (rows, columns), group in groupby(grids):
        count = len(list(group))
        yield patches[start : start + count * rows * columns].unflatten(0, (count, rows, columns))
        start += count * rows * columns


def resized_table(table: Tensor, side: int, grid: Grid, mode: str) -> Tensor:
    """Return learned positions [rows·columns, H] of a grid: the table [side², H] itself, or interpolated in fp32."""
    if grid == (side, side):
        return table
    places = table.view(1, side, side, -1).permute(0, 3, 1, 2).float()
    resized = F.interpolate(places, size=grid, mode=mode.partition("_")[0], align_corners=mode == "bilinear")
    if mode == "bilinear_zeros":  # beyond the centres of the outer places, F.interpolate repeats them
        rows, columns = (_share_inside(length, side, device=table.device) for length in grid)
        resized = resized * rows[:, None] * columns
    return resized.to(table.dtype).permute(0, 2, 3, 1).flatten(0, 2)


def _share_inside(length: int, side: int, *, device: torch.device) -> Tensor:
    """Return the share of each of `length` places that a table of `side` places has, where zeros are around it."""
    centres = (torch.arange(length, device=device) + 0.5) * (side / length) - 0.5
    return 1 - (-centres).clamp(min=0) - (centres - (side - 1)).clamp(min=0)


def unpad_and_concat(
    features: Tensor, groups: Sequence[TileGroup], counts: Sequence[int], *, newline: Tensor, max_tiles: int
) -> Tensor:
    """Return the features of images [F, H] from those of their tiles [Σ counts, H] (LLaVA-OneVision).

    An image has the features of the base tile, then the grid of tiles as one map without its padding, each row followed
    by a newline [H]. A frame of a video has the reduced map, and a newline follows the last frame.

    Args:
        counts: features of each tile.
    """
    tiles = iter(features.split(list(counts)))
    images: list[Tensor] = []
    for is_image, run in groupby(groups, lambda group: group.kind == "image"):
        if not is_image:
            frames = list(run)
            for group, frame in zip(frames, _halved(torch.stack([next(tiles) for _ in frames])), strict=True):
                images += [frame, newline[None]] if group.kind == "last frame" else [frame]
            continue
        for group in run:
            images.append(next(tiles))
            if group.tiles == 1:
                images.append(newline[None])
            else:
                grid = torch.stack([next(tiles) for _ in range(group.tiles - 1)])
                images.append(_lines(grid, group, newline=newline, max_tiles=max_tiles))
    return torch.cat(images)


def _halved(frames: Tensor) -> Tensor:
    """Return the features [frames, ⌈side/2⌉², H] of `frames` [frames, side², H], halved in height and width."""
    side = round(frames.shape[1] ** 0.5)
    maps = frames.unflatten(1, (side, side)).permute(0, 3, 1, 2).contiguous()
    reduced = F.interpolate(maps, (half(side), half(side)), mode="bilinear", align_corners=False)
    return reduced.permute(0, 2, 3, 1).flatten(1, 2)


def _lines(grid: Tensor, group: TileGroup, *, newline: Tensor, max_tiles: int) -> Tensor:
    """Return an image's features with newlines, [height · (width + 1), H], given its tiles' [tiles, side², H]."""
    side = round(grid.shape[1] ** 0.5)
    kept = feature_map(group, side, max_tiles=max_tiles)
    cells = grid.view(*group.grid, side, side, -1).transpose(1, 2)  # tile row, row in it, tile column, column in it, H
    whole = cells.flatten(2, 3).flatten(0, 1)[kept.rows, kept.columns]
    if whole.shape[:2] != (kept.height, kept.width):
        channels_first = whole.permute(2, 0, 1)[None]
        reduced = F.interpolate(channels_first, (kept.height, kept.width), mode="bilinear", align_corners=False)
        whole = reduced[0].permute(1, 2, 0)
    return torch.cat([whole, newline.expand(kept.height, 1, -1)], dim=1).flatten(0, 1)
