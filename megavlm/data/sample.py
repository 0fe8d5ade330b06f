"""A training sample, and how samples become a `PackedBatch`.

A sample is a sequence in which every image has already been expanded to one image token per feature, so lengths,
masks and grids are known everywhere; pixels are only rendered on the ranks that hold the vision part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from megavlm.data.anyres import TileGroup, features_of_images
from megavlm.data.batch import PackedBatch
from megavlm.data.images import grid_of, patchify
from megavlm.data.positions import mrope_positions
from megavlm.errors import UserError


@dataclass(frozen=True, eq=False)
class Image:
    """An image whose size is known and whose pixels are made on demand.

    `render` is a pure function that returns [height, width, channels] bytes: every call gives the same pixels.
    """

    height: int
    width: int
    patch_size: int
    render: Callable[[], NDArray[np.uint8]]

    @property
    def grid(self) -> tuple[int, int]:
        """(rows, columns) in patches."""
        return grid_of(self.height, self.width, self.patch_size)


@dataclass(frozen=True, eq=False)
class Sample:
    """One sequence of L tokens; `images` are in the order in which their tokens appear.

    For a model of tiled images they are tiles, and `tile_groups` say which of them are one image.
    """

    tokens: NDArray[np.int64]  # [L]
    trained: NDArray[np.bool_]  # [L]; the tokens the model must learn to predict (the answers)
    images: tuple[Image, ...] = ()
    tile_groups: tuple[TileGroup, ...] = ()

    def __len__(self) -> int:
        return len(self.tokens)


def collate(
    samples: Sequence[Sample],
    *,
    seq_length: int,
    image_token: int,
    pad_token: int,
    pixel_shuffle: int,
    patch_dim: int,
    with_patches: bool,
    mrope: bool = False,
    anyres_max_tiles: int | None = None,
) -> PackedBatch:
    """Stack samples, padded on the right to `seq_length`, into one micro-batch.

    Position t predicts token t+1: labels are the tokens shifted left by one, and `loss_mask[t]` is 1 where token
    t+1 is trained. The last token of a row and padding predict nothing. Features follow the images: sample by
    sample, in order. `patch_dim` (channels × patch side²) gives an imageless batch its patches of shape
    [0, patch_dim]; `with_patches=False` renders nothing and leaves them None. `mrope` gives each token three positions
    (`positions.py`), else it has one, its place in the row.

    Raises UserError when a sample is longer than `seq_length`.
    """
    assert image_token != pad_token, "padding would be taken for image features"
    tokens = np.full((len(samples), seq_length), pad_token, dtype=np.int64)
    loss_mask = np.zeros((len(samples), seq_length), dtype=np.float32)
    for row, sample in enumerate(samples):
        length = len(sample)
        if length > seq_length:
            raise UserError(
                f"a sample has {length} tokens but --seq-length is {seq_length}: set --seq-length to at least {length}"
            )
        tokens[row, :length] = sample.tokens
        loss_mask[row, : length - 1] = sample.trained[1:]
        grids = [image.grid for image in sample.images]
        features = sum(
            features_of_images(grids, sample.tile_groups, pixel_shuffle=pixel_shuffle, max_tiles=anyres_max_tiles)
        )
        image_tokens = int((sample.tokens == image_token).sum())
        assert image_tokens == features, f"{image_tokens} image tokens for {features} image features"

    labels = np.full_like(tokens, pad_token)
    labels[:, :-1] = tokens[:, 1:]
    positions = np.broadcast_to(np.arange(seq_length, dtype=np.int64), tokens.shape).copy()
    if mrope:
        rows = [
            mrope_positions(row, [image.grid for image in sample.images], image_token=image_token, merge=pixel_shuffle)
            for row, sample in zip(tokens, samples, strict=True)
        ]
        positions = np.stack(rows, axis=1)
    images = [image for sample in samples for image in sample.images]
    patches = None
    if with_patches:
        rendered = [patchify(image.render(), image.patch_size) for image in images]
        patches = torch.cat(rendered) if rendered else torch.empty(0, patch_dim)
        assert patches.shape[1] == patch_dim, f"patches of {patches.shape[1]} values where the model has {patch_dim}"
    return PackedBatch(
        tokens=torch.from_numpy(tokens),
        labels=torch.from_numpy(labels),
        loss_mask=torch.from_numpy(loss_mask),
        positions=torch.from_numpy(positions),
        grids=tuple(image.grid for image in images),
        feature_positions=torch.from_numpy(np.flatnonzero(tokens == image_token)),
        patches=patches,
        tile_groups=tuple(group for sample in samples for group in sample.tile_groups),
        num_tokens=sum(len(sample) for sample in samples),
    )
