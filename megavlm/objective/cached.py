"""What a loss over a global batch takes from each rank and gives back to it.

Legend: R texts of this rank, H width, N terms of the loss that this rank counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megavlm.config.schema import ObjectiveConfig

BLOCK = 2**21  # scores that a rank has in memory at a time


@dataclass(frozen=True, eq=False)
class Representations:
    """This rank's part of the embedded texts of a global batch, with the scalars that the loss learns."""

    vectors: Tensor  # [R, H] fp32, not normalised
    members: Tensor  # [R, 4] int64, columns of `data/types.py`; records are numbered within this rank
    scalars: Tensor  # fp32, in the order of `Objective.learned`; none if they are fixed


@dataclass(frozen=True, eq=False)
class Loss:
    """This rank's share of a loss over the global batch, and the gradient of the whole with respect to its vectors.

    Losses are a sum, not a mean: over all ranks they add up to that of the batch, and so do the scalars' gradients.
    """

    losses: Tensor  # [N] float64
    sources: Tensor  # [N] int64: the data set of each term
    vectors: Tensor  # [R, H]: the gradient
    scalars: Tensor  # this rank's share of the gradient

    def totals(self, num_sources: int) -> Tensor:
        """Return what `Schedule.train` returns: [2 + 2·num_sources] float64."""
        sums = self.losses.new_zeros(2, num_sources)
        if num_sources:
            sums[0].index_add_(0, self.sources, self.losses)
            sums[1].index_add_(0, self.sources, torch.ones_like(self.losses))
        whole = torch.stack([self.losses.sum(), torch.full_like(self.losses.sum(), len(self.losses))])
        return torch.cat([whole, sums.flatten()])


WholeBatchLoss = Callable[[Representations, ObjectiveConfig, dist.ProcessGroup], Loss]


def widths_of(options: ObjectiveConfig, width: int) -> tuple[int, ...]:
    """Return the widths that a loss is applied to: all channels, and beginnings of them (Kusupati et al. 2022)."""
    return tuple(sorted({*options.matryoshka_widths, width}))


def normalized(vectors: Tensor, width: int) -> Tensor:
    """Return the first channels [R, width] of vectors, with length 1."""
    return F.normalize(vectors[:, :width], dim=-1)


def blocks(count: int, across: int) -> Iterator[slice]:
    """Yield consecutive ranges of `count` rows whose scores with `across` others fit into memory together."""
    size = max(1, BLOCK // max(across, 1))
    return (slice(start, min(start + size, count)) for start in range(0, count, size))
