"""Compute the sizes that the families resize images to, by the rule of each reference implementation.

Rounding is part of each rule: one image token more or less shifts all later tokens of the sequence.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import cache

from megavlm.inputs.bad_sample import BadSample, Reason

Size = tuple[int, int]  # (height, width) or (rows, columns)

_MOST_ELONGATED = 200  # beyond this Qwen's processor refuses
LARGEST_SIDE = 4096  # Idefics3 enlarges no further


def shortest_edge(size: Size, edge: int) -> Size:
    """Return the size whose shorter side is `edge`, at the same aspect ratio (CLIP)."""
    short, long = sorted(size)
    scaled = int(edge * long / short)
    return (scaled, edge) if size[1] <= size[0] else (edge, scaled)


def smart_resize(size: Size, *, factor: int, min_pixels: int, max_pixels: int, frames: int = 1, span: int = 1) -> Size:
    """Return sides that are multiples of `factor`, with an area in [min_pixels, max_pixels] and about the same ratio.

    This is the rule of Qwen2-VL and its successors. Qwen3-VL's bounds are of all `frames` of a video together, which
    are counted as a multiple of the `span` in a patch.

    Raises BadSample for images more elongated than 1:200, which the reference refuses.
    """
    height, width = size
    if max(size) / min(size) > _MOST_ELONGATED:
        raise BadSample(Reason.TOO_NARROW, f"{height}×{width} pixels are more elongated than 1:{_MOST_ELONGATED}")
    rows, columns = round(height / factor), round(width / factor)
    pixels = round(frames / span) * span * rows * columns * factor**2
    if pixels > max_pixels:
        shrink = math.sqrt(frames * height * width / max_pixels)
        rows, columns = (max(1, math.floor(side / shrink / factor)) for side in size)
    elif pixels < min_pixels:
        grow = math.sqrt(min_pixels / (frames * height * width))
        rows, columns = (math.ceil(side * grow / factor) for side in size)
    return rows * factor, columns * factor


def at_least(size: Size, side: int) -> Size:
    """Return the size enlarged, if need be, so that no side is shorter than `side` (Qwen3-VL's videos)."""
    enlarged = max(side / size[0], side / size[1], 1.0)
    return int(size[0] * enlarged), int(size[1] * enlarged)


def best_resolution(size: Size, resolutions: Iterable[Size]) -> Size:
    """Return the resolution that keeps most of the image's pixels, and of equals the least padded (LLaVA-NeXT)."""
    height, width = size

    def merit(resolution: Size) -> tuple[int, int]:
        scale = min(resolution[1] / width, resolution[0] / height)
        kept = min(int(width * scale) * int(height * scale), width * height)
        return kept, kept - resolution[0] * resolution[1]

    return max(resolutions, key=merit)  # the first of the best


def fit_inside(size: Size, frame: Size) -> Size:
    """Return the largest size of this aspect ratio inside `frame`; the free side is rounded up (before padding)."""
    height, width = size
    by_height, by_width = frame[0] / height, frame[1] / width
    if by_width < by_height:
        return min(math.ceil(height * by_width), frame[0]), frame[1]
    return frame[0], min(math.ceil(width * by_height), frame[1])


def tile_grid(size: Size, tile: Size, *, fewest: int, most: int) -> Size:
    """Return the (rows, columns) of tiles whose aspect ratio is closest to the image's (InternVL).

    Among equally close grids the larger one is taken, if the image has more than half of its pixels.
    """
    height, width = size
    best, smallest = (1, 1), math.inf
    for rows, columns in _grids(fewest, most):
        difference = abs(width / height - columns / rows)
        fills = height * width > 0.5 * tile[0] * tile[1] * rows * columns
        if difference < smallest or (difference == smallest and fills):
            best, smallest = (rows, columns), difference
    return best


@cache
def _grids(fewest: int, most: int) -> tuple[Size, ...]:
    """Return all (rows, columns) with `fewest` to `most` tiles, in ascending order of tiles, then of columns."""
    grids = [(rows, columns) for columns in range(1, most + 1) for rows in range(1, most + 1)]
    return tuple(sorted((g for g in grids if fewest <= g[0] * g[1] <= most), key=lambda g: g[0] * g[1]))


def longest_edge(size: Size, edge: int) -> Size:
    """Return the size whose longer side is `edge`; the other side is made even (Idefics3)."""
    height, width = size
    ratio = width / height
    if width >= height:
        height, width = _even(int(edge / ratio)), edge
    else:
        height, width = edge, _even(int(edge * ratio))
    height, width = max(height, 1), max(width, 1)
    ratio, longest = width / height, max(height, width)
    if longest > LARGEST_SIDE and width >= height:
        height, width = int(LARGEST_SIDE / ratio), LARGEST_SIDE
    elif longest > LARGEST_SIDE:
        height, width = LARGEST_SIDE, int(LARGEST_SIDE * ratio)
    return max(height, 1), max(width, 1)


def whole_tiles(size: Size, tile: int) -> Size:
    """Return the (rows, columns) of tiles of an image whose longer side is rounded up to whole tiles (Idefics3)."""
    height, width = size
    ratio = width / height
    if width >= height:
        columns = math.ceil(width / tile)
        return math.ceil(int(columns * tile / ratio) / tile), columns
    rows = math.ceil(height / tile)
    return rows, math.ceil(int(rows * tile * ratio) / tile)


def _even(side: int) -> int:
    return side + side % 2
