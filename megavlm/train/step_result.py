"""Sum the numbers of a step (loss, tokens, counters) over all ranks before the update."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from megavlm.train.expert_load import LayerLoad


@dataclass(frozen=True)
class StepResult:
    """The results of one optimizer step, equal on all ranks."""

    loss: float  # mean cross entropy over the trained tokens of the global batch
    trained_tokens: int
    grad_norm: float | None  # before clipping; None if fp16 overflowed or the step was left out
    learning_rate: float
    updated: bool  # False if the step did not change the weights
    refused: str | None  # why the judge refused the step
    overflowed: bool  # fp16: the gradients did not fit at this loss scale
    loss_scale: float | None  # of this step; None except in fp16
    # Of each data set; NaN if the step has no trained token of it, empty if there is only one data set.
    source_losses: tuple[float, ...]
    counters: tuple[float, ...]  # the caller's counters, summed over all ranks
    expert_loads: Mapping[int, LayerLoad] = field(default_factory=dict)  # by language layer; empty without experts
    head_logits: tuple[float, ...] = ()  # the largest of each head; empty without `--qk-clip`

    @classmethod
    def of(
        cls,
        sums: StepSums,
        loads: Mapping[int, LayerLoad],
        *,
        refused: str | None,
        learning_rate: float,
        loss_scale: float | None,
    ) -> StepResult:
        """Return the results of a step with these sums, which was `refused` or updated the weights."""
        return cls(
            loss=sums.mean_loss,
            trained_tokens=int(sums.tokens),
            grad_norm=sums.mean_norm,
            learning_rate=learning_rate,
            updated=sums.norm is not None and refused is None,
            refused=refused,
            overflowed=sums.norm is None,
            loss_scale=loss_scale,
            source_losses=sums.source_losses,
            counters=sums.counters,
            expert_loads=loads,
            head_logits=sums.head_logits,
        )


@dataclass(frozen=True)
class StepSums:
    """What all ranks know of a step before its update."""

    norm: float | None  # of the sums of gradients over tokens; None if fp16 overflowed
    loss: float  # sum of cross entropies over the trained tokens
    tokens: float  # trained ones
    sources: tuple[Sequence[float], Sequence[float]]  # the same two of each data set
    counters: tuple[float, ...]
    tallies: Sequence[float]  # of routers
    head_logits: tuple[float, ...] = ()  # the largest of each head; empty without `--qk-clip`

    @property
    def mean_norm(self) -> float | None:
        """Return the norm of the mean gradient over tokens; None if fp16 overflowed."""
        return None if self.norm is None else self.norm / max(self.tokens, 1.0)

    @property
    def mean_loss(self) -> float:
        """Return the mean cross entropy over tokens."""
        return self.loss / max(self.tokens, 1.0)

    @property
    def source_losses(self) -> tuple[float, ...]:
        """Return the mean cross entropy of each data set; NaN of one without a trained token."""
        return tuple(loss / tokens if tokens else math.nan for loss, tokens in zip(*self.sources, strict=True))


def sum_over_ranks(
    totals: Tensor,
    squared_norm: Tensor | None,
    counters: Sequence[float],
    *,
    counts: bool,
    tallies: Tensor | None = None,
    logits: Tensor | None = None,
) -> StepSums:
    """Sum a rank's totals (`Schedule.train`; if it `counts`), counters and routers' tallies over all ranks, and wait
    for the device.

    The gradient norm of rank 0 counts, so that all ranks decide alike on it, whatever happens to their own. x − x is 0
    of a number and NaN of all else: what is not finite on any rank is not finite in the sum. `logits`, which are the
    same on all ranks, come to the host on the way.
    """
    own = totals.new_zeros(()) if squared_norm is None else squared_norm
    shown = own if dist.get_rank() == 0 else own - own
    told = totals if counts else totals - totals
    counted = torch.tensor(counters, dtype=totals.dtype).to(totals.device, non_blocking=True)
    parts = [shown.reshape(1), told, counted]
    everything = torch.cat(parts if tallies is None else [*parts, tallies])
    dist.all_reduce(everything)
    summed = len(everything)
    found = (everything if logits is None else torch.cat([everything, logits])).tolist()
    (squared, loss, tokens, *rest), beside = found[:summed], tuple(found[summed:])
    sources = (len(totals) - 2) // 2
    first = 2 * sources + len(counters)  # of the tallies
    losses = rest[:sources], rest[sources : 2 * sources]
    norm = None if squared_norm is None else squared**0.5
    return StepSums(norm, loss, tokens, losses, tuple(rest[2 * sources : first]), rest[first:], beside)
