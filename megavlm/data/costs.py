"""Compute the forward FLOPs of samples and images from their sizes, and balance images over encoders by FLOPs.

Plans and MFU use the same FLOP counts. Every rank computes the same result, so the ranks do not communicate.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from megavlm.arch.image_tokens import Grid
from megavlm.arch.kinds import layer_cost
from megavlm.arch.layers import encoder_names, layer_names, part_of
from megavlm.arch.workload import OF_ENCODERS, Workload, image_workload, sliding_squares, sound_work
from megavlm.config.schema import Config, ModelConfig
from megavlm.data.types import SampleCost
from megavlm.inputs.batch import ImageSizes, Mask

_OF_TEXT = ("tokens", "token_squares", "sliding_squares", "trained_tokens")  # fields of `Workload`, as those are


@dataclass(frozen=True)
class CostModel:
    """Coefficients of the forward FLOPs, a linear function of the fields of a workload."""

    model: ModelConfig
    vision: tuple[float, ...]  # in the order of `OF_ENCODERS`
    language: tuple[float, ...]  # in the order of `_OF_TEXT`

    @classmethod
    def of(cls, model: ModelConfig) -> CostModel:
        def unit(field: str, *parts: str) -> float:
            work = Workload(**{**dict.fromkeys(Workload.__dataclass_fields__, 0), field: 1})
            names = [name for name in layer_names(model) if part_of(name) in parts]
            return sum(layer_cost(name, model, work).forward_flops for name in names)

        return cls(
            model=model,
            vision=tuple(unit(field, "vision", "projector") for field in OF_ENCODERS),
            language=tuple(unit(field, "language") for field in _OF_TEXT),
        )

    def cost(self, *, length: int, grids: Sequence[Grid], images: int, sounds: Sequence[int] = ()) -> SampleCost:
        """Return the cost of a sample of `length` tokens with `images` images, whose patches are in `grids`, and with
        sounds of so many mel frames each.
        """
        work = replace(image_workload(grids, self.model), **sound_work(sounds, self.model))
        # The number of trained tokens is not known yet: all tokens are counted.
        text = (length, length * length, sliding_squares(length, self.model.language.window_size), length)
        return SampleCost(
            length=length,
            patches=sum(map(math.prod, grids)),
            images=images,
            vision=sum(unit * getattr(work, field) for unit, field in zip(self.vision, OF_ENCODERS, strict=True)),
            language=sum(unit * count for unit, count in zip(self.language, text, strict=True)),
        )


@dataclass(frozen=True)
class ImageAssignment:
    """Assigns the images of a step to the colocated encoders of a model replica by forward FLOPs."""

    model: ModelConfig
    ranks: int  # of a model replica
    width: int = 1  # consecutive ranks that hold one encoder (`--vision-tp`)

    @classmethod
    def of(cls, config: Config, *, ranks: int) -> ImageAssignment:
        """Return the assignment of a run whose model replicas have `ranks` ranks each."""
        return cls(config.model, ranks, config.parallel.vision_tensor_model_parallel_size)

    def encoders(self, sizes: Sequence[ImageSizes], sounds: Sequence[Sequence[int]] = ()) -> list[NDArray[np.int64]]:
        """Return, for each micro-batch of a step, the encoder [N] of each of its images, then, for each, those of its
        sounds of so many mel frames. Where images go does not depend on sounds.
        """
        flops = [encoder_flops(image.grids, self.model) for each in sizes for image in each.split()]
        of_sounds = [encoder_flops((), self.model, frames) for each in sounds for frames in each]
        encoders = np.array(assign_longest_first(flops, self.ranks // self.width, of_sounds), dtype=np.int64)
        return np.split(encoders, np.cumsum([*(each.num_images for each in sizes), *map(len, sounds)])[:-1])

    def by_rank(self, sizes: Sequence[ImageSizes]) -> list[list[Mask]]:
        """Return, for each micro-batch of a step and each rank, the mask [N] of the images that the rank encodes."""
        return [[encoders == rank // self.width for rank in range(self.ranks)] for encoders in self.encoders(sizes)]

    def own(self, sizes: Sequence[ImageSizes], *, rank: int) -> list[Mask]:
        """Return, for each micro-batch of a step, the mask [N] of the images that one rank encodes."""
        return [masks[rank] for masks in self.by_rank(sizes)]


@lru_cache(maxsize=4096)
def encoder_flops(grids: tuple[Grid, ...], model: ModelConfig, *sounds: int) -> float:
    """Return the forward FLOPs of the encoders for one image of these grids of patches, and sounds of mel frames."""
    work = replace(image_workload(grids, model), **sound_work(sounds, model))
    return sum(layer_cost(name, model, work).forward_flops for name in encoder_names(model))


def assign_longest_first(costs: Sequence[float], ranks: int, later: Sequence[float] = ()) -> tuple[int, ...]:
    """Return the rank of each item: items go to the least loaded rank, the costliest first (LPT; Graham 1969).

    The largest load is at most 4/3 of the optimum. Items of costs `later` follow when all others are assigned. Every
    rank computes the same assignment from the same costs: items of equal cost are assigned in order, and the lowest of
    equally loaded ranks takes the item.
    """
    loads = [(0.0, rank) for rank in range(ranks)]
    every = [*costs, *later]
    owners = [0] * len(every)
    for item in sorted(range(len(every)), key=lambda item: (item >= len(costs), -every[item], item)):
        load, rank = heapq.heappop(loads)
        owners[item] = rank
        heapq.heappush(loads, (load + every[item], rank))
    return tuple(owners)
