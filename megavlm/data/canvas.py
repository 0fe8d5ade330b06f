"""Positions of an image and its slices on one canvas (MiniCPM-V 4.7's M-RoPE, as in Transformers' `get_rope_index`)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from megavlm.arch.image_tokens import Grid

Crop = tuple[int, int, int, int]  # the first of its features, the place behind them, their rows and columns


def canvas_positions(
    tokens: NDArray[np.int64],
    are_features: NDArray[np.bool_],
    grids: Sequence[Grid],
    *,
    marks: Sequence[int],
    merge: int,
) -> NDArray[np.int64]:
    """Return (time, row, column) of each token of one sequence: [S] → [3, S].

    Text moves all three on by one per token. An image is a copy of the whole, which slices may follow, with a line
    break between their rows. All stand at one time t, the next free position, on a canvas from (t, t) on, as large as
    the slices together, or as the copy alone. A slice's features lie where the slice does, the copy's are spread over
    the canvas. Marks lie at corners: before the image at (t − 1, t − 1), behind the copy past the far corner, those of
    a slice at its first and last feature, and a line break right of its row. Text goes on past the longer side.

    Args:
        are_features: [S] which tokens are features of images and videos.
        grids: (rows, columns) in patches of each run of features, in order; `merge`² patches make one feature.
        marks: tokens around features, that before a slice first.
    """
    positions = np.empty((3, len(tokens)), dtype=np.int64)
    place = moment = 0
    for copy, *slices in _images(tokens, are_features, grids, before_slice=marks[0], merge=merge):
        first, behind = max(copy[0] - 1, 0), (slices or [copy])[-1][1]
        while behind < len(tokens) and tokens[behind] in marks:
            behind += 1
        if first > place:
            positions[:, place:first] = np.arange(moment, moment + first - place)
            moment += first - place
        on_canvas = positions[:, first:behind]
        on_canvas[:] = 0
        height, width = _lay_out(on_canvas, copy, slices, first=first)
        on_canvas += moment
        on_canvas[1:, 0] = max(moment - 1, 0)
        moment += max(height, width) + 1
        place = behind
    positions[:, place:] = np.arange(moment, moment + len(tokens) - place)
    return positions


def _images(
    tokens: NDArray[np.int64],
    are_features: NDArray[np.bool_],
    grids: Sequence[Grid],
    *,
    before_slice: int,
    merge: int,
) -> list[list[Crop]]:
    """Return the crops of each image or frame: the copy of the whole, then its slices."""
    starts, images, taken = np.flatnonzero(are_features), list[list[Crop]](), 0
    for grid in grids:
        rows, columns = grid[0] // merge, grid[1] // merge
        first, taken = int(starts[taken]), taken + rows * columns
        crop = first, first + rows * columns, rows, columns
        if images and tokens[first - 1] == before_slice:
            images[-1].append(crop)
        else:
            images.append([crop])
    return images


def _lay_out(place: NDArray[np.int64], copy: Crop, slices: Sequence[Crop], *, first: int) -> tuple[int, int]:
    """Write the rows and columns on a canvas into `place` [3, …], whose tokens begin at `first`. Return its size."""
    breaks = [number for number, (one, other) in enumerate(pairwise(slices), 1) if other[0] - one[1] > 2]
    across = breaks[0] if breaks and len(slices) % breaks[0] == 0 else len(slices)
    _, _, rows, columns = (slices or [copy])[0]
    height, width = rows * max(len(slices) // max(across, 1), 1), columns * max(across, 1)

    def put(start: int, end: int, row: NDArray[np.int64] | int, column: NDArray[np.int64] | int) -> None:
        place[1, start - first : end - first] = row
        place[2, start - first : end - first] = column

    def spread(crop: Crop, size: tuple[int, int], corner: tuple[int, int]) -> None:
        of_rows, of_columns = (
            torch.linspace(0, length - 1, count).round().long().numpy() + start  # halves round as in the reference
            for length, count, start in zip(size, crop[2:], corner, strict=True)
        )
        put(crop[0], crop[1], of_rows.repeat(crop[3]), np.tile(of_columns, crop[2]))

    put(copy[1], copy[1] + 1, height, width)
    spread(copy, (height, width), (0, 0))
    for number, crop in enumerate(slices):
        row, column = number // across * rows, number % across * columns
        put(crop[0] - 1, crop[0], row, column)
        put(crop[1], crop[1] + 1, row + crop[2] - 1, column + crop[3] - 1)
        spread(crop, (crop[2], crop[3]), (row, column))
    for number in breaks:
        put(slices[number - 1][1] + 1, slices[number][0] - 1, ((number - 1) // across + 1) * rows - 1, across * columns)
    return height, width
