"""Cross entropy of logits whose columns (the vocabulary) tensor-parallel ranks share, in the precision they come in.

Arithmetic is in fp32, on a few positions at a time; of all logits there is never an fp32 copy. Their gradient takes
their place in memory. Legend: T positions, W columns of this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megavlm.planner.memory import LOSS_WORK

CrossEntropy = Callable[[Tensor, Tensor, dist.ProcessGroup], Tensor]  # as `vocab_parallel_cross_entropy`


def vocab_parallel_cross_entropy(logits: Tensor, labels: Tensor, group: dist.ProcessGroup) -> Tensor:
    """−log softmax(logits)[label] of each position: [..., W] in any precision, [...] → fp32 [...].

    A label in no rank's columns has logit 0. The backward pass writes the gradient over the logits, so nothing else may
    need them by then; autograd refuses where it does.
    """
    loss: Tensor = _CrossEntropy.apply(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1), group)
    return loss.view(labels.shape)


class _CrossEntropy(torch.autograd.Function):
    """log s + m − x[label], with m the largest logit and s = Σ exp(x − m), has the gradient exp(x − m)/s − 1[label]."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, group: dist.ProcessGroup) -> Tensor:
        columns, held = own_columns(labels, logits.shape[1], group)
        predicted = logits.gather(1, columns[:, None])[:, 0].float().where(held, 0.0)
        pieces = [_largest_and_sum(part) for (part,) in in_pieces(logits)]
        largest, sums = (torch.cat(parts) for parts in zip(*pieces, strict=True))
        largest, sums, predicted = over_ranks(largest, sums, predicted, group)
        ctx.save_for_backward(logits, largest, sums, columns, held)
        return sums.log() - (predicted - largest)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        logits = ctx.saved_tensors[0].detach()
        for piece in in_pieces(logits, *ctx.saved_tensors[1:], gradient):
            write_gradient(*piece)
        return logits, None, None


def in_pieces(logits: Tensor, *others: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Views of as many positions as `LOSS_WORK` holds in fp32, of each tensor."""
    count = max(1, LOSS_WORK // (4 * logits.shape[1]))
    return zip(*(tensor.split(count) for tensor in (logits, *others)), strict=True)


def own_columns(labels: Tensor, width: int, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """[T] each: the label's column among this rank's, 0 where another rank has it, and whether this rank has it."""
    columns = labels - group.rank() * width
    held = (columns >= 0) & (columns < width)
    return columns.where(held, 0), held


def _largest_and_sum(logits: Tensor) -> tuple[Tensor, Tensor]:
    """m and Σ exp(x − m) of each position's logits on this rank, [T] in fp32."""
    largest = logits.amax(1, keepdim=True).float()
    return largest[:, 0], (logits - largest).exp_().sum(1)


def over_ranks(largest: Tensor, sums: Tensor, predicted: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, ...]:
    """Return the three [T] of the whole vocabulary from those of each rank, by two reductions in all."""
    if group.size() == 1:
        return largest, sums, predicted
    whole = largest.clone()
    dist.all_reduce(whole, op=dist.ReduceOp.MAX, group=group)
    added = torch.stack([sums * (largest - whole).exp_(), predicted])
    dist.all_reduce(added, group=group)
    return whole, *added.unbind()


def write_gradient(
    logits: Tensor, largest: Tensor, sums: Tensor, columns: Tensor, held: Tensor, gradient: Tensor
) -> None:
    """Put (exp(x − m)/s − 1[label]) · gradient in the place of x."""
    scaled = (logits - largest[:, None]).exp_()
    scaled[torch.arange(len(columns), device=columns.device), columns] -= sums.where(held, 0.0)
    torch.mul(scaled, (gradient / sums)[:, None], out=logits)
