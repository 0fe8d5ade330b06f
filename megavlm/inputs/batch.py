"""`MicroBatch`: text, image sizes, and the patches of the images that this rank encodes; also the key/value cache.

Legend: B sequences, S positions per sequence, N images, P patches, D values of a patch (channels × patch side²),
F image features, each of which replaces one image token, T mel frames of sounds, M mel bins. Of the key/value cache: L
positions of capacity, G key/value heads, E head width.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from megavlm.arch.image_tokens import Grid, TileGroup, features_of, tokens_per_image
from megavlm.config.schema import ModelConfig, ProjectorConfig

Mask = NDArray[np.bool_]
_ROUTE = ("patch_rows", "sent", "received")  # tensors of `DealtImages`


@dataclass(frozen=True)
class ImageSizes:
    """The sizes of N images, in the order of their image tokens.

    For models that tile images (`arch/image_tokens.py`), `grids` has one grid per tile, and `tile_groups` groups the
    tiles by image.
    """

    grids: tuple[Grid, ...] = ()  # of patches of each image, of each tile, or of each group of a video's frames
    tile_groups: tuple[TileGroup, ...] = ()  # one per tiled image; empty if the model does not tile images

    @property
    def num_images(self) -> int:
        return len(self.tile_groups or self.grids)

    @property
    def num_patches(self) -> int:
        return sum(map(math.prod, self.grids))

    def image_tokens(self, projector: ProjectorConfig) -> list[int]:
        """Return the number of image tokens (= features) of each image."""
        return tokens_per_image(self.grids, self.tile_groups, projector)

    def split(self) -> list[ImageSizes]:
        """Return one `ImageSizes` per image."""
        if not self.tile_groups:
            return [ImageSizes((grid,)) for grid in self.grids]
        bounds = pairwise(accumulate((group.tiles for group in self.tile_groups), initial=0))
        return [
            ImageSizes(self.grids[start:end], (group,))
            for (start, end), group in zip(bounds, self.tile_groups, strict=True)
        ]

    def select(self, chosen: Mask) -> ImageSizes:
        """Return the sizes of the images that are True in `chosen` [N]."""
        return join_sizes([image for image, keep in zip(self.split(), chosen, strict=True) if keep])

    def patch_rows(self, chosen: Mask) -> NDArray[np.int64]:
        """Return the indices, among all P patches, of the patches of the images that are True in `chosen` [N]."""
        return np.flatnonzero(np.repeat(chosen, [image.num_patches for image in self.split()]))


def join_sizes(sizes: Sequence[ImageSizes]) -> ImageSizes:
    """Concatenate the sizes of several groups of images, in order."""
    return ImageSizes(
        grids=tuple(grid for each in sizes for grid in each.grids),
        tile_groups=tuple(group for each in sizes for group in each.tile_groups),
    )


@dataclass(frozen=True, eq=False)
class ImageBatch:
    """The images that this rank encodes, as patches: image after image, row-major within an image or tile."""

    sizes: ImageSizes
    patches: Tensor  # [P, D] normalised pixels (channel, row, column within a patch), in the model's type
    # The ranks that all encode these images, if only the first of them has read the patches. On the others `patches`
    # has no memory (device "meta") until the micro-batch is on the device, where they are broadcast.
    vision_group: dist.ProcessGroup | None = None

    def split(self) -> list[ImageBatch]:
        """Return one `ImageBatch` per image, whose patches are a view of this batch's."""
        sizes = self.sizes.split()
        patches = self.patches.split([each.num_patches for each in sizes])
        return [ImageBatch(size, part) for size, part in zip(sizes, patches, strict=True)]

    def feature_counts(self, model: ModelConfig) -> list[int]:
        """Return the number of features of each image."""
        return self.sizes.image_tokens(model.projector)

    def select(self, chosen: Mask) -> ImageBatch:
        """Return a batch of the images that are True in `chosen` [N]; their patches are copied."""
        return ImageBatch(self.sizes.select(chosen), self.patches[torch.from_numpy(self.sizes.patch_rows(chosen))])


@dataclass(frozen=True, eq=False)
class DealtImages:
    """Images or sounds dealt to a context-parallel rank, and the all-to-all of features to the ranks that use them."""

    patch_rows: Tensor  # [P'] int64: indices of its images' patches (or mel frames) among all
    num_features: int  # of its images or sounds
    sent: Tensor  # int64: indices of its features for rank 0, then for rank 1, …
    sent_sizes: tuple[int, ...]  # number of features for each rank
    received: Tensor  # [F'] int64: index of the received feature for each image or audio token of the part
    received_sizes: tuple[int, ...]  # number of features from each rank


@dataclass(frozen=True, eq=False)
class SoundBatch:
    """The sounds of a micro-batch, in the order of their audio tokens. All ranks of a model replica know their sizes.

    A context-parallel rank has the sounds that are dealt to it, and the positions of its part of the text.
    """

    frames: tuple[int, ...]  # mel frames of each sound
    mels: Tensor  # [T, M] fp32: log-mel features of the sounds; without memory ("meta") on ranks that encode none
    positions: Tensor  # [N] int64: audio tokens' indices into the flattened [B·S] …
    rows: Tensor  # [N] int64: … and their features' indices among those of the sounds, or among the received ones
    dealt: DealtImages | None = None

    def split(self) -> list[SoundBatch]:
        """Return one `SoundBatch` per sound, whose mel features are a view of this batch's, with all positions."""
        parts = zip(self.frames, self.mels.split(self.frames), strict=True)
        return [replace(self, frames=(length,), mels=part) for length, part in parts]

    def feature_counts(self, model: ModelConfig) -> list[int]:
        """Return the number of features of each sound."""
        return [features_of(length, model.audio) for length in self.frames]

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors that have memory by name."""
        mels = {} if self.mels.is_meta else {"mels": self.mels}
        dealt = {} if self.dealt is None else {"sounds_sent": self.dealt.sent}
        return {**mels, **dealt, "sound_positions": self.positions, "sound_rows": self.rows}

    def with_tensors(self, tensors: Mapping[str, Tensor]) -> SoundBatch:
        """Return the sounds with these tensors, by the names of `tensors`."""
        mels, dealt = tensors.get("mels", self.mels), self.dealt
        dealt = None if dealt is None else replace(dealt, sent=tensors["sounds_sent"])
        return SoundBatch(self.frames, mels, tensors["sound_positions"], tensors["sound_rows"], dealt)


@dataclass(frozen=True, eq=False)
class TextBatch:
    """B sequences of S positions: text tokens, image tokens and padding. A sequence may hold several samples."""

    tokens: Tensor  # [B, S] int64
    # [B, S] int64: the token that each position predicts. With D multi-token prediction layers, labels and mask become
    # [(1 + D)·B, S], depth after depth, in `context_parts.with_further_tokens`.
    labels: Tensor
    loss_mask: Tensor  # [B, S] float32: 1 where the prediction has a loss
    # [B, S] int64: the rotary position of each token; [1, S] if all sequences have the same. With M-RoPE [3, B, S] or
    # [3, 1, S]: time, row and column.
    positions: Tensor
    feature_positions: Tensor  # [F] int64: the image tokens' indices into the flattened [B·S], in order of features
    # [L] int64: the trained tokens' indices into the flattened [B·S], at least one; None: compute all logits
    trained_positions: Tensor | None = None
    # [samples + 1] int32: sample boundaries in the flattened [B·S]; None if each sequence is one sample. It stays on
    # the host, which reads it.
    cu_seqlens: Tensor | None = None
    lengths: tuple[int, ...] = ()  # the number of tokens of each sample, without padding
    # per sample: index of its first token in the flattened [B·S], and number of tokens before its first trained token
    prefixes: tuple[tuple[int, int], ...] = ()
    # per sequence: number of tokens without padding, and of trained tokens (of loss terms for embedded texts)
    row_counts: tuple[tuple[int, int], ...] = ()
    sources: Tensor | None = None  # [B, S] int64: the data set of each token; None if there is only one
    # Of embedded texts or answers, in the order of `lengths`: [R, 4] int64, with the columns of `data/types.py`.
    members: Tensor | None = None
    pool: Tensor | None = None  # [2, K] int64: pooled positions in the flattened [B·S], and the text of each
    pool_weights: Tensor | None = None  # [K] float32: their weights, which add up to 1 for each text
    # [R] float64: log-probability of each answer by the run's initial model; for a reward head, the margin of a chosen
    # answer, and 0 of others
    reference: Tensor | None = None
    # [B, S, K] int64 and float32: a teacher's likeliest tokens at each position, and their weights as labels; what the
    # weights leave of 1 is the weight of the label
    teacher_tokens: Tensor | None = None
    teacher_weights: Tensor | None = None
    further_positions: Tensor | None = None  # [D, B, S] or [D, 3, B, S]: `positions` of the token 1, … D places later

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens without padding."""
        return sum(self.lengths)

    @property
    def teacher(self) -> tuple[Tensor, Tensor] | None:
        """Return `teacher_tokens` and `teacher_weights`; None without a teacher."""
        if self.teacher_tokens is None or self.teacher_weights is None:
            return None
        return self.teacher_tokens, self.teacher_weights

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors by field name, without fields that are None."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}


@dataclass(frozen=True, eq=False)
class LocalFeatures:
    """Features from a colocated encoder for the sequence-parallel part of the text on this tensor-parallel rank."""

    positions: Tensor  # [F'] int64: the entries of `TextBatch.feature_positions` in this rank's part
    values: Tensor | None  # [F', 1 + DeepStack layers, Hl] on the device; None on ranks without the embedding


@dataclass(frozen=True, eq=False)
class ContextPart:
    """Data of whole rows on a context-parallel rank, whose `MicroBatch.text` has only its part of each row.

    In `TextBatch`, `cu_seqlens`, `lengths`, `prefixes` and `row_counts` still describe whole rows.
    """

    tokens: Tensor  # [B, S] int64: tokens of whole rows
    image_sizes: ImageSizes  # of all images of the text
    images: DealtImages | None = None  # None if a colocated encoder has encoded them


class KeyValueCache:
    """Key/value cache of this rank's language layers for B rows: keys and values [B, L, G, width] of each layer."""

    def __init__(self, length: int) -> None:
        """Set the capacity to `length` positions per row; a layer's memory is allocated at its first `add`."""
        self.length = length
        self._kept: dict[object, tuple[Tensor, Tensor]] = {}
        self._states: dict[object, tuple[Tensor, Tensor]] = {}

    def add(self, layer: object, places: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store a layer's keys and values [B, S, G, width] at `places` [B, S]; return the layer's whole cache."""
        if layer not in self._kept:
            keys, values = (each.new_zeros(len(each), self.length, *each.shape[2:]) for each in (key, value))
            self._kept[layer] = keys, values
        rows = torch.arange(key.shape[0], device=key.device)[:, None]
        for kept, new in zip(self._kept[layer], (key, value), strict=True):
            kept[rows, places] = new
        return self._kept[layer]

    def state(self, layer: object) -> tuple[Tensor, Tensor] | None:
        """Return the cached last inputs and recurrent state of a linear attention layer; None before its first pass."""
        return self._states.get(layer)

    def keep_state(self, layer: object, state: tuple[Tensor, Tensor]) -> None:
        """Cache the last inputs and the recurrent state of a linear attention layer."""
        self._states[layer] = state


@dataclass(frozen=True, eq=False)
class Continuation:
    """Position of a pass in the key/value cache: its S tokens of row b follow `starts[b]` cached positions.

    `last[b]` < S is the last token of row b in this pass. Padding follows it, which the next pass overwrites.
    """

    cache: KeyValueCache
    starts: Tensor  # [B] int64, on the device
    last: Tensor  # [B] int64, on the device

    def advanced(self) -> Continuation:
        """Return the continuation for the next pass, which has one token per row."""
        return replace(self, starts=self.starts + self.last + 1, last=torch.zeros_like(self.last))


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """One micro-batch of a data-parallel rank. All ranks of a model replica have the same `text` and `image_sizes`,
    until `context_parts.part_of` reduces the text to the part of each context-parallel rank.
    """

    text: TextBatch
    image_sizes: ImageSizes  # of all images of the text; with `DealtImages`, of the images that this rank encodes
    images: ImageBatch | None = None  # the images that this rank encodes; None on a rank without vision layers
    features: LocalFeatures | None = None  # set once a colocated encoder has run
    continuation: Continuation | None = None  # set while answers are generated
    context: ContextPart | None = None  # None: the text is of whole rows
    sounds: SoundBatch | None = None  # None: none, or no audio encoder

    @classmethod
    def of_images(cls, images: ImageBatch | None, sounds: SoundBatch | None = None) -> MicroBatch:
        """Return a micro-batch without text, for the layers of one encoder: of images, or of sounds."""
        none = torch.empty(0, 0, dtype=torch.int64)
        text = TextBatch(tokens=none, labels=none, loss_mask=none, positions=none, feature_positions=none)
        return cls(text, ImageSizes() if images is None else images.sizes, images, sounds=sounds)

    @property
    def sound_frames(self) -> tuple[int, ...]:
        """Return the mel frames of each sound."""
        return () if self.sounds is None else self.sounds.frames

    @property
    def num_features(self) -> int:
        """Return how many features this rank's images have, if the vision encoder is in the pipeline."""
        dealt = None if self.context is None else self.context.images
        return self.text.feature_positions.numel() if dealt is None else dealt.num_features

    @property
    def row_tokens(self) -> Tensor:
        """Return the tokens [B, S] of whole rows."""
        return self.text.tokens if self.context is None else self.context.tokens

    def host_tensors(self) -> dict[str, Tensor]:
        """Return, by name, the tensors to copy from the host to the device.

        Equal rows of positions are reduced to one if the batch is on the host.
        """
        found = self.text.tensors()
        found.pop("cu_seqlens", None)
        found["positions"] = _distinct_rows(self.text.positions)
        if self.images is not None and not self.images.patches.is_meta:
            found["patches"] = self.images.patches
        if self.sounds is not None:
            found |= self.sounds.tensors()
        if self.features is not None:
            found["local_positions"] = self.features.positions
        if self.context is not None:
            found["row_tokens"] = self.context.tokens
            if self.context.images is not None:
                found |= {name: getattr(self.context.images, name) for name in _ROUTE}
        return found

    def with_tensors(self, tensors: Mapping[str, Tensor]) -> MicroBatch:
        """Return a micro-batch in which `tensors`, by the names of `host_tensors`, replace the present ones."""
        images, features, context = self.images, self.features, self.context
        if images is not None:
            images = replace(images, patches=tensors.get("patches", images.patches))
        if features is not None:
            features = replace(features, positions=tensors["local_positions"])
        if context is not None:
            dealt = context.images
            if dealt is not None:
                route: dict[str, Any] = {name: tensors[name] for name in _ROUTE}
                dealt = replace(dealt, **route)
            context = replace(context, tokens=tensors["row_tokens"], images=dealt)
        copied: dict[str, Any] = {name: tensors[name] for name in self.text.tensors() if name in tensors}
        text = replace(self.text, **copied)
        sounds = None if self.sounds is None else self.sounds.with_tensors(tensors)
        return replace(self, text=text, images=images, sounds=sounds, features=features, context=context)

    def to(self, device: torch.device | str) -> MicroBatch:
        """Return a copy on `device`. `cu_seqlens`, which the host reads, stays on the host to avoid synchronisation."""
        tensors = self.host_tensors().items()
        return self.with_tensors({name: tensor.to(device, non_blocking=True) for name, tensor in tensors})


def _distinct_rows(positions: Tensor) -> Tensor:
    """Return one row of positions if all rows are equal, as in unpadded text; on the device return them unchanged."""
    several = positions.shape[-2] > 1
    if several and positions.device.type == "cpu" and bool((positions == positions[..., :1, :]).all()):
        return positions[..., :1, :]
    return positions
