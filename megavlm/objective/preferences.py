"""Losses of pairs of answers: DPO, IPO, ORPO and SimPO, each a sum over pairs.

Of a prompt x with the chosen answer w and the rejected answer l, log π(y) is the log-probability of all tokens of an
answer y, the last turn; |y| is their number, π₀ the model that the run begins with, ε `label_smoothing`, σ the sigmoid.

    DPO (Rafailov et al. 2023, with smoothed labels as Mitchell 2023)
        −(1 − ε) log σ(β h) − ε log σ(−β h)            h = log π(w)/π₀(w) − log π(l)/π₀(l)
    IPO (Azar et al. 2024, of means over tokens)
        (h − 1/(2β))²                                  h = log π(w)/π₀(w) / |w| − log π(l)/π₀(l) / |l|
    SimPO (Meng et al. 2024)
        −(1 − ε) log σ(β h − γ) − ε log σ(γ − β h)     h = log π(w) / |w| − log π(l) / |l|
    ORPO (Hong et al. 2024)
        −log p(w) − β log σ(log o(w) − log o(l))       log p(y) = log π(y) / |y|,  o = p / (1 − p)

`rpo_alpha` adds −log π(w) / |w| so many times (Pang et al. 2024). A pair is in one micro-batch, so that sums over
micro-batches and ranks, divided by the number of pairs, are the same at any layout.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megavlm.config.schema import ObjectiveConfig
from megavlm.data.types import SOURCE
from megavlm.inputs.batch import MicroBatch


class _OverParts(torch.autograd.Function):
    """Adds what context-parallel ranks have; each sends the gradient of the sum, which all have, into its own part."""

    @staticmethod
    def forward(ctx: object, own: Tensor, group: dist.ProcessGroup) -> Tensor:
        whole = own.clone()
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def answer_log_probabilities(batch: MicroBatch, losses: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """Return the log-probability of each answer of a micro-batch, and its number of tokens: [R] float64 each.

    `losses` [B, S] are the cross entropies of this rank's part of the rows, whose other parts `group` has.
    """
    text = batch.text
    assert text.pool is not None
    assert text.members is not None
    positions, answers = text.pool
    found = -losses.flatten()[positions].double()
    each = torch.stack([found, torch.ones_like(found)], dim=1)
    sums = each.new_zeros(len(text.members), 2).index_add(0, answers, each)
    if group.size() > 1:
        sums = _OverParts.apply(sums, group)
    return sums[:, 0], sums[:, 1]


def preference_loss(
    batch: MicroBatch, num_sources: int, options: ObjectiveConfig, group: dist.ProcessGroup, losses: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the summed loss of the pairs of a micro-batch, their number, and the sums for `Schedule.train`.

    These are [2 + 2·num_sources + 5]: as of `next_token`, then `ANSWER_MEASURES`. Context-parallel ranks compute the
    same, and the first one counts.
    """
    logs, lengths = answer_log_probabilities(batch, losses, group)
    reference = batch.text.reference
    assert reference is not None or options.kind not in ("dpo", "ipo"), "the data loader has read the references"
    terms, rewards = pair_losses(logs, lengths, torch.zeros_like(logs) if reference is None else reference, options)
    total = terms.sum() + 0.0 * losses.sum()  # a micro-batch without pairs has gradients, too
    margin = rewards[:, 0] - rewards[:, 1]
    measured = [*rewards.sum(0), margin.sum(), (margin > 0).sum(), lengths.sum()]
    parts = [torch.stack([terms.sum(), terms.new_tensor(len(terms))])]
    if num_sources:
        assert batch.text.members is not None
        sources = batch.text.members[::2, SOURCE]
        for values in (terms, torch.ones_like(terms)):
            parts.append(values.new_zeros(num_sources).index_add(0, sources, values))
    sums = torch.cat([*parts, torch.stack([each.double() for each in measured])]).detach()
    first = group.rank() == 0
    pairs = torch.tensor(len(terms) if first else 0, dtype=torch.int, device=losses.device)
    return total.to(losses.dtype), pairs, sums if first else torch.zeros_like(sums)


def pair_losses(logs: Tensor, lengths: Tensor, reference: Tensor, options: ObjectiveConfig) -> tuple[Tensor, Tensor]:
    """Return the loss of each pair, [P], and the rewards of its answers, [P, 2].

    Given are the log-probabilities, numbers of tokens and reference log-probabilities of answers, [2·P] each, in the
    order chosen, rejected. Rewards are β · log π/π₀, or without a reference β · log π / |y|.
    """
    beta, kind = options.beta, options.kind
    lengths = lengths.clamp(min=1)
    means = (logs / lengths).unflatten(0, (-1, 2))
    ratios = (logs - reference).unflatten(0, (-1, 2))
    if kind == "dpo":
        losses = _smoothed(beta * (ratios[:, 0] - ratios[:, 1]), options.label_smoothing)
    elif kind == "ipo":
        each = ratios / lengths.unflatten(0, (-1, 2))
        losses = (each[:, 0] - each[:, 1] - 1 / (2 * beta)) ** 2
    elif kind == "simpo":
        losses = _smoothed(beta * (means[:, 0] - means[:, 1]) - options.simpo_gamma, options.label_smoothing)
    else:
        # log o = log p − log(1 − p); p of a mean below 0 is below 1, but for rounding
        odds = means - torch.log(-torch.expm1(means.clamp(max=-1e-9)))
        losses = -means[:, 0] - beta * F.logsigmoid(odds[:, 0] - odds[:, 1])
    if options.rpo_alpha:
        losses = losses - options.rpo_alpha * means[:, 0]
    return losses, (beta * (ratios if kind in ("dpo", "ipo") else means)).detach()


def _smoothed(logits: Tensor, smoothing: float) -> Tensor:
    return -(1 - smoothing) * F.logsigmoid(logits) - smoothing * F.logsigmoid(-logits)
