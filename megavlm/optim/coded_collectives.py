"""Reduce-scatter, all-reduce and all-gather of codes (`codes.py`) in place of fp32 or bf16 numbers (Wang et al. 2023).

A ring would add up codes and round once a hop. Here each rank sends a code of each part to the rank that sums it, which
adds decoded numbers in fp32, in the order of ranks: one rounding, and the same sum however messages arrive. What a rank
keeps for itself is not coded.

With error feedback a rank adds to its next numbers what coding has lost of these, so that no part of a gradient is lost
for good (Seide et al. 2014; Karimireddy et al. 2019): it sends Q(g + e) and keeps e ← g + e − Q(g + e).
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from megavlm.optim.codes import Coded
from megavlm.parallel.groups import Levels


def reduce_scatter(numbers: Tensor, group: dist.ProcessGroup, coded: Coded, error: Tensor | None) -> int:
    """Sum a contiguous fp32 tensor over a group; this rank's part of it becomes its part of the sum, the rest is lost.

    `error` is the residual, of the same size, which is updated; None: no error feedback. Returns the bytes sent.
    """
    ranks, own = group.size(), group.rank()
    if ranks == 1:
        return 0
    rows = numbers.view(ranks, -1)
    sent = _coded_with_feedback(rows, coded, None if error is None else error.view(ranks, -1), own)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    decoded = coded.decode(received, rows.shape[1])
    decoded[own] = rows[own]
    torch.sum(decoded, dim=0, out=rows[own])
    return sent.numel() // ranks * (ranks - 1)


def reduce_scatter_in_two_levels(numbers: Tensor, levels: Levels, coded: Coded, error: Tensor | None) -> int:
    """As `reduce_scatter`, over a group of k subgroups of g ranks: exact within a subgroup, codes between them.

    Rank (a, l), the l-th of subgroup a, owns part a·g + l. Within its subgroup it sums the parts of all (·, l), and
    sends those that are not its own to their owners: N/g numbers instead of N, so that a node sends as much as a ring
    would (the two hops of qgZ, Wang et al. 2023). `error` has N/g numbers.
    """
    size, count = levels.inside.size(), levels.across.size()
    parts = numbers.view(count, size, -1)
    sums = numbers.new_empty(numbers.numel() // size)
    dist.reduce_scatter_tensor(sums, parts.transpose(0, 1).contiguous().view(-1), group=levels.inside)
    bytes_sent = reduce_scatter(sums, levels.across, coded, error)
    own = levels.across.rank()
    parts[own, levels.inside.rank()] = sums.view(count, -1)[own]
    return bytes_sent


def all_reduce(numbers: Tensor, group: dist.ProcessGroup, coded: Coded, error: Tensor | None) -> int:
    """Set a contiguous fp32 tensor to its sum over a group, the same on all ranks: the sums are coded as well.

    Arguments as in `reduce_scatter`; the tensor has a multiple of the group's size. Returns the bytes sent.
    """
    ranks, own = group.size(), group.rank()
    if ranks == 1:
        return 0
    bytes_sent = reduce_scatter(numbers, group, coded, error)
    rows = numbers.view(ranks, -1)
    kept = None if error is None else error.view(ranks, -1)[own : own + 1]  # what is not coded before is coded here
    part = _coded_with_feedback(rows[own : own + 1], coded, kept, None)
    return bytes_sent + _gather(rows, part, group, coded)


def all_gather(numbers: Tensor, group: dist.ProcessGroup, coded: Coded) -> int:
    """Gather each rank's part of a contiguous tensor as codes, its own part too, so that all have the same numbers.

    Returns the bytes sent.
    """
    rows = numbers.view(group.size(), -1)
    return _gather(rows, coded.encode(rows[group.rank() : group.rank() + 1]), group, coded)


def _gather(rows: Tensor, part: Tensor, group: dist.ProcessGroup, coded: Coded) -> int:
    gathered = part.new_empty(group.size(), part.shape[1])
    dist.all_gather_into_tensor(gathered, part, group=group)
    rows.copy_(coded.decode(gathered, rows.shape[1]))
    return part.numel() * (group.size() - 1)


def _coded_with_feedback(rows: Tensor, coded: Coded, error: Tensor | None, own: int | None) -> Tensor:
    """Return the codes of rows and their residual, and update it; of the row `own`, which is not sent, it stays.

    A residual that is not finite is dropped: the step that made it is not taken.
    """
    if error is None:
        return coded.encode(rows)
    others = [slice(0, None)] if own is None else [slice(0, own), slice(own + 1, None)]
    for each in others:
        rows[each] += error[each]
    sent = coded.encode(rows)
    decoded = coded.decode(sent, rows.shape[1])
    for each in others:
        torch.sub(rows[each], decoded[each], out=error[each]).nan_to_num_(0.0, 0.0, 0.0)
    return sent
