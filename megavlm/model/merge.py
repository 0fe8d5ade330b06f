"""Neighbouring patches into one feature. Needs torch alone, so that reading a config.json needs no more either."""

from __future__ import annotations

import torch
from torch import Tensor

from megavlm.model.windows import Grid


def pixel_shuffle(patches: Tensor, grids: tuple[Grid, ...], factor: int) -> Tensor:
    """Concatenate each factor × factor block of neighbouring patches: [P, H] → [P/factor², H·factor²].

    Blocks are in row-major order, and inside a block (row, column, channel).
    """
    if factor == 1:
        return patches
    merged = []
    for (rows, columns), image in zip(grids, patches.split([r * c for r, c in grids]), strict=True):
        blocks = image.view(rows // factor, factor, columns // factor, factor, -1).transpose(1, 2)
        merged.append(blocks.reshape(rows * columns // factor**2, -1))
    return torch.cat(merged)
