"""Convert a micro-batch's tokens and patches to keyword arguments for models of Transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from megavlm.config.schema import ModelConfig, VisionConfig

if TYPE_CHECKING:
    from torch import Tensor

    from megavlm.inputs.batch import MicroBatch

Batch: TypeAlias = "MicroBatch"
Given: TypeAlias = "dict[str, Tensor]"  # keyword arguments of a model's forward


def tokens_and_pixels(batch: Batch, model: ModelConfig) -> Given:
    """Return the inputs of a model that needs only tokens and images of one size."""
    return {"input_ids": batch.text.tokens, **pixel_values(batch, model.vision)}


def pixel_values(batch: Batch, vision: VisionConfig) -> Given:
    """Return {"pixel_values": [N, C, height, width]} for images of one size, nothing for a batch without images."""
    import torch

    images = unpatchify(batch, vision)
    return {"pixel_values": torch.stack(images)} if images else {}


def unpatchify(batch: MicroBatch, vision: VisionConfig) -> list[Tensor]:
    """Return each image as [C, height, width], from its row-major patches of (channel, row, column)."""
    side, images = vision.patch_size, []
    for (rows, columns), patches in zip(batch.image_sizes.grids, _by_image(batch), strict=True):
        cells = patches.view(rows, columns, vision.in_channels, side, side).permute(2, 0, 3, 1, 4)
        images.append(cells.reshape(vision.in_channels, rows * side, columns * side))
    return images


def in_blocks(batch: MicroBatch, side: int) -> Tensor:
    """Return all patches [P, D] in block order: the patches of each `side` × `side` block are consecutive."""
    import torch

    blocks = [
        patches.view(rows // side, side, columns // side, side, -1).transpose(1, 2).flatten(0, 3)
        for (rows, columns), patches in zip(batch.image_sizes.grids, _by_image(batch), strict=True)
    ]
    return torch.cat(blocks)


def feature_kinds(batch: MicroBatch, model: ModelConfig) -> tuple[Tensor, Tensor]:
    """Return the kind of each token [B, S] (0 text, 1 image, 2 video), and the kind of each grid (1 or 2)."""
    import torch

    tokens = batch.text.tokens
    kinds = tokens.eq(model.image_token or 0).int()
    if model.video_token is not None:
        kinds = kinds + 2 * tokens.eq(model.video_token).int()
    counts = torch.tensor(batch.image_sizes.image_tokens(model.projector), device=tokens.device)
    return kinds, kinds[kinds > 0][counts.cumsum(0) - 1]  # also if padding has moved the features


def _by_image(batch: MicroBatch) -> tuple[Tensor, ...]:
    assert batch.images is not None
    return batch.images.patches.split([rows * columns for rows, columns in batch.image_sizes.grids])
