"""Multimodal rotary positions (M-RoPE; Wang et al. 2024, Qwen2-VL): where tokens stand in time, height and width."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def mrope_positions(
    tokens: NDArray[np.int64], grids: Sequence[tuple[int, int]], *, image_token: int, merge: int
) -> NDArray[np.int64]:
    """(time, row, column) of each token of one sequence: [S] → [3, S].

    Text moves all three on by one per token. A still image takes one moment: its feature in row r and column c of the
    merged grid stands at (t, t + r, t + c), where t is the next free position, and text goes on at t + its longer side,
    the first position that none of its features reached. Padding counts as text.

    Args:
        grids: (rows, columns) in patches of the sequence's images, in order; `merge`² patches make one feature.
    """
    positions = np.empty((3, len(tokens)), dtype=np.int64)
    starts = np.flatnonzero(tokens == image_token)
    place = moment = 0
    for grid in grids:
        rows, columns = grid[0] // merge, grid[1] // merge
        first = int(starts[np.searchsorted(starts, place)])
        positions[:, place:first] = np.arange(moment, moment + first - place)
        moment += first - place
        place = first + rows * columns
        cells = np.indices((1, rows, columns)).reshape(3, -1)
        positions[:, first:place] = moment + cells
        moment += max(rows, columns)
    positions[:, place:] = np.arange(moment, moment + len(tokens) - place)
    return positions
