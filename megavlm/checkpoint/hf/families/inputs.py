"""Our patches as the images that Transformers takes."""

from __future__ import annotations

import torch
from torch import Tensor

from megavlm.config.schema import VisionConfig
from megavlm.data.batch import MicroBatch


def pixel_values(batch: MicroBatch, vision: VisionConfig) -> dict[str, Tensor]:
    """{"pixel_values": [N, C, height, width]} of images of one size; nothing for a batch without images."""
    images = unpatchify(batch, vision)
    return {"pixel_values": torch.stack(images)} if images else {}


def unpatchify(batch: MicroBatch, vision: VisionConfig) -> list[Tensor]:
    """Each image as [C, height, width], from its row-major patches of (channel, row, column)."""
    assert batch.patches is not None
    side, images = vision.patch_size, []
    sizes = [rows * columns for rows, columns in batch.grids]
    for (rows, columns), patches in zip(batch.grids, batch.patches.split(sizes), strict=True):
        cells = patches.view(rows, columns, vision.in_channels, side, side).permute(2, 0, 3, 1, 4)
        images.append(cells.reshape(vision.in_channels, rows * side, columns * side))
    return images
