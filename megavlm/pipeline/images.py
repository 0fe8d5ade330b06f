"""The images of a window of micro-batches, as colocated encoders take them: in which order, which of them, at what
cost, how many in a pass. Pure arithmetic on grids.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, pairwise

import numpy as np

from megavlm.arch.anyres import TileGroup
from megavlm.arch.image_tokens import tokens_per_image
from megavlm.arch.kinds import layer_cost
from megavlm.arch.layers import encoder_names
from megavlm.arch.workload import image_workload
from megavlm.config.schema import ModelConfig
from megavlm.data.batch import MicroBatch
from megavlm.pipeline.feature_exchange import Rows

Grid = tuple[int, int]


@dataclass(frozen=True)
class EncoderInput:
    """One image, or the tiles of one image."""

    batch: int  # micro-batch of the window
    patches: slice  # its rows of that micro-batch's patches
    grids: tuple[Grid, ...]
    tile_groups: tuple[TileGroup, ...]  # one, or none where the model's images are not tiled
    features: int  # image tokens that it becomes

    @property
    def num_patches(self) -> int:
        return self.patches.stop - self.patches.start


def encoder_inputs(batches: Sequence[MicroBatch], model: ModelConfig) -> list[EncoderInput]:
    """The images of a window of micro-batches, in the order of their tokens."""
    found = []
    for index, batch in enumerate(batches):
        counts = tokens_per_image(batch.grids, batch.tile_groups, model.projector)
        groups: list[tuple[TileGroup, ...]] = [(group,) for group in batch.tile_groups] or [()] * len(batch.grids)
        start = place = 0
        for group, features in zip(groups, counts, strict=True):
            grids = batch.grids[place : place + (group[0].tiles if group else 1)]
            end = start + sum(rows * columns for rows, columns in grids)
            found.append(EncoderInput(index, slice(start, end), grids, group, features))
            start, place = end, place + len(grids)
    return found


@lru_cache(maxsize=4096)
def encoder_flops(grids: tuple[Grid, ...], model: ModelConfig) -> float:
    """Forward FLOPs of the encoder for one image's grids: what images are balanced by."""
    work = image_workload(grids, model)
    return sum(layer_cost(name, model, work).forward_flops for name in encoder_names(model))


def assign_images(
    batches: Sequence[MicroBatch], model: ModelConfig, *, encoders: int
) -> tuple[list[EncoderInput], tuple[int, ...]]:
    """A window's images, and which of a replica's encoders takes each."""
    images = encoder_inputs(batches, model)
    return images, assign_longest_first([encoder_flops(image.grids, model) for image in images], encoders)


def patches_by_rank(batches: Sequence[MicroBatch], model: ModelConfig, *, ranks: int, width: int) -> list[Rows]:
    """For each rank of a replica, places among all patches of a window, in order: those of the images that it encodes.

    `width` neighbouring ranks are an encoder.
    """
    starts = list(accumulate((batch.num_patches for batch in batches), initial=0))
    taken: list[list[Rows]] = [[np.empty(0, dtype=np.int64)] for _ in range(ranks // width)]
    for image, encoder in zip(*assign_images(batches, model, encoders=ranks // width), strict=True):
        start = starts[image.batch]
        taken[encoder].append(np.arange(start + image.patches.start, start + image.patches.stop))
    return [np.concatenate(taken[rank // width]) for rank in range(ranks)]


def held_inputs(mine: Sequence[EncoderInput], batches: Sequence[MicroBatch]) -> list[EncoderInput]:
    """Images that a rank encodes, with the rows where it has their patches: among all of a micro-batch, or only `mine`
    where the data sent no others.
    """
    places, found = [0] * len(batches), []
    for image in mine:
        batch = batches[image.batch]
        assert batch.patches is not None, "every rank that encodes has pixels"
        start = places[image.batch]
        places[image.batch] = end = start + image.num_patches
        has_all = len(batch.patches) == batch.num_patches
        found.append(image if has_all else replace(image, patches=slice(start, end)))
    return found


def split_into_passes(inputs: Sequence[EncoderInput], most_patches: int) -> list[Sequence[EncoderInput]]:
    """Images in order, divided where the next one would exceed `most_patches`; a larger one is a pass of its own."""
    starts, patches = [0], 0
    for index, image in enumerate(inputs):
        if patches and patches + image.num_patches > most_patches:
            starts.append(index)
            patches = 0
        patches += image.num_patches
    return [inputs[a:b] for a, b in pairwise([*starts, len(inputs)]) if b > a]


def assign_longest_first(costs: Sequence[float], ranks: int) -> tuple[int, ...]:
    """Return the rank of each item: the costliest goes first, always to the least loaded rank (LPT; Graham 1969).

    The largest load is at most 4/3 of the best possible. Every rank computes the same assignment from the same costs:
    items of equal cost go in order, and of equally loaded ranks the lowest takes the item.
    """
    loads = [(0.0, rank) for rank in range(ranks)]
    owners = [0] * len(costs)
    for item in sorted(range(len(costs)), key=lambda item: (-costs[item], item)):
        load, rank = heapq.heappop(loads)
        owners[item] = rank
        heapq.heappush(loads, (load + costs[item], rank))
    return tuple(owners)
