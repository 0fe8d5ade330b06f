"""The texts of all data-parallel ranks on each of them, and the sum of the gradients that they have for each text.

Legend: R texts of this rank, L of the rank with the most, N ranks, H width.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from megavlm.data.members import PADDING
from megavlm.objective.texts import renumbered


def gathered(vectors: Tensor, members: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """Return the vectors [N·L, H] and members [N·L, 4] of all ranks: of rank n the rows from n·L on, then padding."""
    ranks = group.size()
    if ranks == 1:
        return vectors, members
    longest = torch.tensor(len(vectors), device=vectors.device)
    dist.all_reduce(longest, op=dist.ReduceOp.MAX, group=group)
    length = int(longest)
    padded = vectors.new_zeros(length, vectors.shape[1])
    padded[: len(vectors)] = vectors
    known = members.new_full((length, members.shape[1]), PADDING)
    known[: len(members)] = renumbered(members, group.rank())
    everyone = padded.new_empty(ranks * length, padded.shape[1])
    theirs = known.new_empty(ranks * length, known.shape[1])
    dist.all_gather_into_tensor(everyone, padded, group=group)
    dist.all_gather_into_tensor(theirs, known, group=group)
    return everyone, theirs


def own_sum(gradients: Tensor, texts: int, group: dist.ProcessGroup) -> Tensor:
    """Return the sum over ranks of the gradients [N·L, H] for this rank's `texts`, [R, H]."""
    ranks = group.size()
    if ranks == 1:
        return gradients
    own = gradients.new_empty(len(gradients) // ranks, gradients.shape[1])
    dist.reduce_scatter_tensor(own, gradients, group=group)
    return own[:texts]
