"""The texts of all data-parallel ranks on each of them, and the sum of the gradients that they have for each text.

Legend: R texts of this rank, L of the rank with the most, N ranks, H width.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from megavlm.data.types import PADDING
from megavlm.objective.texts import renumbered


def longest(count: int, group: dist.ProcessGroup, device: torch.device) -> int:
    """Return the largest count of all ranks."""
    if group.size() == 1:
        return count
    counts = torch.tensor(count, device=device)
    dist.all_reduce(counts, op=dist.ReduceOp.MAX, group=group)
    return int(counts)


def gathered(own: Tensor, length: int, group: dist.ProcessGroup, *, padding: int = 0) -> Tensor:
    """Return the rows [N·L, …] of all ranks: of rank n those from n·L on, then padding up to the `length` L."""
    if group.size() == 1:
        return own
    padded = own.new_full((length, *own.shape[1:]), padding)
    padded[: len(own)] = own
    everyone = own.new_empty(group.size() * length, *own.shape[1:])
    dist.all_gather_into_tensor(everyone, padded, group=group)
    return everyone


def gathered_members(members: Tensor, length: int, group: dist.ProcessGroup) -> Tensor:
    """Return the members [N·L, 4] of all ranks' texts, with records that no two ranks share."""
    return gathered(renumbered(members, group.rank()), length, group, padding=PADDING)


def own_sum(gradients: Tensor, texts: int, group: dist.ProcessGroup) -> Tensor:
    """Return the sum over ranks of the gradients [N·L, H] for this rank's `texts`, [R, H]."""
    ranks = group.size()
    if ranks == 1:
        return gradients
    own = gradients.new_empty(len(gradients) // ranks, gradients.shape[1])
    dist.reduce_scatter_tensor(own, gradients, group=group)
    return own[:texts]
