"""A training sample, and how samples become a `MicroBatch`.

A sample is a sequence in which every image has already been expanded to one image token per feature, so lengths,
masks and grids are known everywhere; pixels are only rendered on the ranks that hold the vision part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megavlm.data.anyres import TileGroup, features_of_images
from megavlm.data.batch import MicroBatch
from megavlm.data.images import grid_of, patchify
from megavlm.data.positions import mrope_positions
from megavlm.errors import UserError


class Picture(Protocol):
    """An image in patches: where they lie is known, they are made on demand."""

    @property
    def grids(self) -> tuple[tuple[int, int], ...]:
        """(rows, columns) in patches of what the tower sees of the image: of itself, or of each of its tiles."""
        ...

    @property
    def arrangement(self) -> tuple[int, int]:
        """(rows, columns) of the tiles that the image is cut into, (0, 0) where it stays whole."""
        ...

    def patches(self) -> Tensor:
        """[patches of all grids, D] float32, normalised: the same with every call. May raise BadSample."""
        ...


@dataclass(frozen=True, eq=False)
class Image:
    """An image whose size is known and whose pixels are made on demand.

    `render` is a pure function that returns [height, width, channels] bytes: every call gives the same pixels.
    """

    height: int
    width: int
    patch_size: int
    render: Callable[[], NDArray[np.uint8]]
    arrangement: tuple[int, int] = (0, 0)

    @property
    def grids(self) -> tuple[tuple[int, int], ...]:
        return (grid_of(self.height, self.width, self.patch_size),)

    def patches(self) -> Tensor:
        return patchify(self.render(), self.patch_size)


@dataclass(frozen=True, eq=False)
class Tiles:
    """An image as a processor cuts it."""

    grids: tuple[tuple[int, int], ...]
    make: Callable[[], Tensor]
    arrangement: tuple[int, int] = (0, 0)

    def patches(self) -> Tensor:
        return self.make()


@dataclass(frozen=True, eq=False)
class Sample:
    """One sequence of L tokens; `images` are in the order in which their tokens appear.

    For a model of tiled images they are tiles, and `tile_groups` say which of them are one image.
    """

    tokens: NDArray[np.int64]  # [L]
    trained: NDArray[np.bool_]  # [L]; the tokens the model must learn to predict (the answers)
    images: tuple[Picture, ...] = ()
    tile_groups: tuple[TileGroup, ...] = ()
    source: int = 0  # which of the data sets it comes from

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def grids(self) -> tuple[tuple[int, int], ...]:
        return tuple(grid for image in self.images for grid in image.grids)


Row = Sequence[Sample]  # samples that share one sequence


def collate(
    rows: Sequence[Row],
    *,
    seq_length: int,
    image_token: int,
    pad_token: int,
    pixel_shuffle: int,
    patch_dim: int,
    with_patches: bool,
    mrope: bool = False,
    anyres_max_tiles: int | None = None,
    with_sources: bool = False,
) -> MicroBatch:
    """Stack rows, padded on the right to `seq_length`, into one micro-batch.

    The samples of a row follow one another; positions restart with each, and `cu_seqlens` keeps their attention apart.
    Position t predicts token t+1: labels are the tokens shifted left by one, and `loss_mask[t]` is 1 where token
    t+1 is trained and of the same sample. Features follow the images: row by row, sample by sample, in order.
    `patch_dim` (channels × patch side²) gives an imageless batch its patches of shape [0, patch_dim];
    `with_patches=False` makes none and leaves them None. `mrope` gives each token three positions (`positions.py`).

    Raises UserError when a row is longer than `seq_length`.
    """
    assert image_token != pad_token, "padding would be taken for image features"
    tokens = np.full((len(rows), seq_length), pad_token, dtype=np.int64)
    loss_mask = np.zeros((len(rows), seq_length), dtype=np.float32)
    positions = np.empty((3 if mrope else 1, len(rows), seq_length), dtype=np.int64)
    sources = np.zeros((len(rows), seq_length), dtype=np.int64)
    bounds = [0]
    for number, row in enumerate(rows):
        end = 0
        for sample in row:
            start, end = end, end + len(sample)
            if end > seq_length:
                raise UserError(
                    f"a sample has {end} tokens but --seq-length is {seq_length}: set --seq-length to at least {end}"
                )
            tokens[number, start:end] = sample.tokens
            loss_mask[number, start : end - 1] = sample.trained[1:]
            sources[number, start:end] = sample.source
            positions[:, number, start:end] = (
                mrope_positions(sample.tokens, sample.grids, image_token=image_token, merge=pixel_shuffle)
                if mrope
                else np.arange(len(sample))
            )
            bounds.append(number * seq_length + end)
        # Padding goes on counting, as a sequence of its own where others are kept apart.
        positions[:, number, end:] = (
            positions[:, number, end - 1 : end].max(initial=-1) + 1 + np.arange(seq_length - end)
        )
        if end < seq_length:
            bounds.append((number + 1) * seq_length)

    labels = np.full_like(tokens, pad_token)
    labels[:, :-1] = tokens[:, 1:]
    samples = [sample for row in rows for sample in row]
    for sample in samples:
        _check_features(sample, image_token=image_token, pixel_shuffle=pixel_shuffle, max_tiles=anyres_max_tiles)
    packed = any(len(row) > 1 for row in rows)
    return MicroBatch(
        tokens=torch.from_numpy(tokens),
        labels=torch.from_numpy(labels),
        loss_mask=torch.from_numpy(loss_mask),
        positions=torch.from_numpy(positions if mrope else positions[0]),
        grids=tuple(grid for sample in samples for grid in sample.grids),
        feature_positions=torch.from_numpy(np.flatnonzero(tokens == image_token)),
        patches=_patches_of(samples, patch_dim) if with_patches else None,
        cu_seqlens=torch.tensor(bounds, dtype=torch.int32) if packed else None,
        tile_groups=tuple(group for sample in samples for group in sample.tile_groups),
        lengths=tuple(len(sample) for sample in samples),
        sources=torch.from_numpy(sources) if with_sources else None,
    )


def _check_features(sample: Sample, *, image_token: int, pixel_shuffle: int, max_tiles: int | None) -> None:
    """Every feature of the images needs a token to stand at."""
    features = sum(
        features_of_images(sample.grids, sample.tile_groups, pixel_shuffle=pixel_shuffle, max_tiles=max_tiles)
    )
    tokens = int((sample.tokens == image_token).sum())
    assert tokens == features, f"{tokens} image tokens for {features} image features"


def _patches_of(samples: Sequence[Sample], patch_dim: int) -> Tensor:
    """[P, patch_dim] of all images, in order."""
    made = [image.patches() for sample in samples for image in sample.images]
    patches = torch.cat(made) if made else torch.empty(0, patch_dim)
    assert patches.shape[1] == patch_dim, f"patches of {patches.shape[1]} values where the model has {patch_dim}"
    return patches
