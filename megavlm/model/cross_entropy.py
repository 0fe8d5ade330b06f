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

from megavlm.arch.language_ends import LOSS_WORK

# As `vocab_parallel_cross_entropy`.
CrossEntropy = Callable[[Tensor, Tensor, dist.ProcessGroup], tuple[Tensor, Tensor, Tensor]]


def vocab_parallel_cross_entropy(
    logits: Tensor, labels: Tensor, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor, Tensor]:
    """Return −log softmax(logits)[label] of each position, and m and s of its softmax exp(x − m)/s: [T] in fp32 each.

    Logits [T, W] in any precision become (softmax − 1[label]) · `unit_of` their type, the gradient of the loss. A label
    [T] in no rank's columns has logit 0.
    """
    columns, held = own_columns(labels, first=group.rank() * logits.shape[1], width=logits.shape[1])
    predicted = label_logits(logits, columns, held)
    pieces = [_largest_and_sum(part) for (part,) in in_pieces(logits)]
    largest, sums = (torch.cat(parts) for parts in zip(*pieces, strict=True))
    largest, sums, predicted = over_ranks(largest, sums, predicted, group)
    unit = torch.full_like(sums, unit_of(logits.dtype))
    for piece in in_pieces(logits, largest, sums, columns, held, unit):
        write_gradient(*piece)
    return sums.log() - (predicted - largest), largest, sums


def te_cross_entropy(
    kernel: Any, logits: Tensor, labels: Tensor, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `vocab_parallel_cross_entropy` by Transformer Engine's kernel, whose unit is 1.

    It walks rows by the last stride of the labels and the second last of the logits: both must be one run of memory.
    Its loss is log Σ exp(x) − x[label], which gives the sum: m = log Σ exp(x), s = 1.
    """
    columns, held = own_columns(labels, first=group.rank() * logits.shape[1], width=logits.shape[1])
    predicted = label_logits(logits, columns, held)
    if group.size() > 1:
        dist.all_reduce(predicted, group=group)
    loss = kernel(logits[None], labels[None].contiguous(), group, is_cg_capturable=True)[0]
    return loss, loss + predicted, torch.ones_like(loss)


def unit_of(dtype: torch.dtype) -> float:
    """Return by what gradients of logits are multiplied: in fp16, probabilities below 6e-8 would be 0."""
    return 2.0**12 if dtype == torch.float16 else 1.0


def in_pieces(logits: Tensor, *others: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Views of as many positions as `LOSS_WORK` holds in fp32, of each tensor."""
    count = max(1, LOSS_WORK // (4 * logits.shape[1]))
    return zip(*(tensor.split(count) for tensor in (logits, *others)), strict=True)


def own_columns(labels: Tensor, *, first: int, width: int) -> tuple[Tensor, Tensor]:
    """[T] each: the label's column among `width` from `first` on, 0 where it is another, and whether it is of these."""
    columns = labels - first
    held = (columns >= 0) & (columns < width)
    return columns.where(held, 0), held


def label_logits(logits: Tensor, columns: Tensor, held: Tensor) -> Tensor:
    """x[label] of each position in fp32, [T]; 0 where it is another rank's."""
    return logits.gather(1, columns[:, None])[:, 0].float().where(held, 0.0)


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
