"""Samples of megavlm from the batches of verl. Nothing here imports verl or megatron-core."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from megavlm.config.schema import Config, ModelConfig
from megavlm.data.source import ComputedSource
from megavlm.data.tokenizers import NO_IMAGE
from megavlm.data.types import Sample
from megavlm.errors import UserError
from megavlm.inputs.patches import LoadedImage

_KNOWN = {"pixel_values", "image_grid_thw", "mm_token_type_ids"}  # of an image processor; the last follows from tokens


class Rollouts(ComputedSource):
    """The samples of the batch that verl has handed over last, by their numbers in it (`--data rollouts`)."""

    def __init__(self, config: Config) -> None:
        model = config.model
        self.samples: Sequence[Sample] = ()
        self.vocab_size = model.language.vocab_size
        self.image_token = NO_IMAGE if model.image_token is None else model.image_token
        features = {self.image_token, model.video_token, model.audio_token}
        self.pad_token = next(token for token in range(4) if token not in features)  # nothing attends to padding

    def sample(self, index: int) -> Sample:
        return self.samples[index]


def samples_of(
    data: Mapping[str, Any], images: Sequence[Mapping[str, Tensor] | None], model: ModelConfig
) -> list[Sample]:
    """Return the sequences of a batch as samples; `images` are those of each sequence, as image processors make them.

    Log-probabilities are computed where `loss_mask` reaches: over whole sequences, or over the answers at their ends.
    """
    tokens, mask = data["input_ids"], data["loss_mask"]
    if mask.is_nested:
        answers = mask.offsets().diff()
    else:  # answers, padded on the right
        answers = data["attention_mask"][:, -mask.shape[1] :].sum(1)
    return [
        Sample(each.numpy(), np.arange(len(each)) >= len(each) - answer, pictures(given, model))
        for each, answer, given in zip(tokens.cpu().unbind(), answers.tolist(), images, strict=True)
    ]


def pictures(given: Mapping[str, Tensor] | None, model: ModelConfig) -> tuple[LoadedImage, ...]:
    """Return the images of a sequence: whole ones of one size, [N, C, height, width], or the patches of Qwen's models.

    Raises UserError for videos, and for images that are cut into tiles.
    """
    if not given:
        return ()
    if unknown := given.keys() - _KNOWN:
        raise UserError(f"verl's batch has {', '.join(sorted(unknown))}, which this engine does not read: leave it out")
    pixels, side, channels = given["pixel_values"].cpu(), model.vision.patch_size, model.vision.in_channels
    if "image_grid_thw" not in given:
        cells = pixels.unflatten(3, (-1, side)).unflatten(2, (-1, side)).permute(0, 2, 4, 1, 3, 5)
        return tuple(LoadedImage((tuple(image.shape[:2]),), image.flatten(0, 1).flatten(1)) for image in cells)
    grids, block = given["image_grid_thw"].tolist(), model.projector.pixel_shuffle
    if any(frames != 1 for frames, _, _ in grids):
        raise UserError("verl's batch has images of several frames, which this engine does not read: leave videos out")
    still = pixels.unflatten(1, (channels, -1, side**2))[:, :, 0].flatten(1)  # the frames of an image are equal
    parts = still.split([rows * columns for _, rows, columns in grids])
    return tuple(
        LoadedImage(
            ((rows, columns),),
            part.view(rows // block, columns // block, block, block, -1).transpose(1, 2).flatten(0, 3),
        )
        for part, (_, rows, columns) in zip(parts, grids, strict=True)
    )
