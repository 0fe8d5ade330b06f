"""`MicroBatch`: all that a micro-batch is, between the data and the model.

Legend: B samples, S language positions per sample, N images, P patches of all images, D pixels of a patch
(channels × patch side²), F image features (= image tokens in the text).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megavlm.arch.anyres import TileGroup


@dataclass(frozen=True)
class MicroBatch:
    """One micro-batch of one data-parallel rank.

    Images are packed: their patches follow each other in `patches`, row-major within an image, and image i is
    `grids[i]` (rows, columns) patches. Features of all images, in the same order, replace the embeddings of the
    tokens at `feature_positions`. A rank that holds no vision part may carry `patches=None`, and one that encodes some
    of the images for others only the patches of those; a rank without the output layer still carries the labels (they
    are small and every rank can check the shapes).

    A model of tiled images (`anyres.py`) sees tiles as images; `tile_groups` say which of them are one image.
    """

    tokens: Tensor  # [B, S] int64; image places hold the tokenizer's image token
    labels: Tensor  # [B, S] int64; the token each position must predict
    loss_mask: Tensor  # [B, S] float32; 1 where the prediction is trained
    # [B, S] int64, or [1, S] where rows are alike: rotary position of each token; with M-RoPE [3, B, S]: time, height,
    # width
    positions: Tensor
    grids: tuple[tuple[int, int], ...]  # per image: (rows, columns) in patches
    feature_positions: Tensor  # [F] int64; index into the flattened [B·S] tokens, in feature order
    # [P, D] normalised pixels (channel, row, column within a patch): float32 as the data make them, then in the type
    # that the model computes in (`staging.py`)
    patches: Tensor | None
    # [sequences+1] int32 over the flattened [B·S], on the host whatever the device; None: B sequences of S
    cu_seqlens: Tensor | None = None
    tile_groups: tuple[TileGroup, ...] = ()  # per tiled image: how many of `grids` it is; empty where none is tiled
    lengths: tuple[int, ...] = ()  # tokens of each sample, padding not counted
    sources: Tensor | None = None  # [B, S] int64: which data set a token is from; None where there is but one
    # Ranks that all need `patches`, which the first of them alone holds: where a micro-batch arrives on the device the
    # others get them. Until then theirs have a shape and no memory (device "meta").
    vision_group: dist.ProcessGroup | None = None
    # Where a colocated encoder has already run: [F', 1 + DeepStack layers, Hl], those of the features that this rank
    # merges into its hidden states.
    features: Tensor | None = None

    @property
    def num_tokens(self) -> int:
        """Positions that are not padding."""
        return sum(self.lengths)

    @property
    def num_patches(self) -> int:
        return sum(rows * columns for rows, columns in self.grids)

    @property
    def num_images(self) -> int:
        return len(self.tile_groups or self.grids)

    def to(self, device: torch.device | str) -> MicroBatch:
        """The same batch on another device, but for what the host needs to know: it must not wait to be told."""
        moved: dict[str, Any] = {name: value.to(device, non_blocking=True) for name, value in self.travelling().items()}
        return replace(self, **moved)

    def travelling(self) -> dict[str, Tensor]:
        """By field, the tensors that layers read on the device and the data make on the host."""
        values: dict[str, Any] = {**vars(self), "positions": _rows_that_differ(self.positions)}
        return {
            name: value
            for name, value in values.items()
            if isinstance(value, Tensor) and name not in _NEVER_TRAVELS and not value.is_meta
        }


_NEVER_TRAVELS = ("cu_seqlens", "features")  # read on the host; made on the device


def _rows_that_differ(positions: Tensor) -> Tensor:
    """One row of positions where all are alike, as samples without padding or images have them. Asked on the host."""
    several = positions.shape[-2] > 1
    if several and positions.device.type == "cpu" and bool((positions == positions[..., :1, :]).all()):
        return positions[..., :1, :]
    return positions
