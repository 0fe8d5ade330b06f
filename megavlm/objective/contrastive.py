"""InfoNCE over a global batch (van den Oord et al. 2018; CLIP, DPR), a share of the work on each rank.

Of a query q and a positive p of it, with cosines s and temperature τ:

    ℓ(q→p) = −s(q,p)/τ + log( e^{s(q,p)/τ} + Σ_d e^{s(q,d)/τ} )

over all documents d of the batch that do not answer q: positives and hard negatives of all queries, but for those that
are the same as a positive of q. In the other direction, over all queries i that p does not answer,

    ℓ(p→q) = −s(q,p)/τ + log( e^{s(q,p)/τ} + Σ_i e^{s(i,p)/τ} )

A pair's loss is ℓ(q→p), or with `model.objective.symmetric` the mean of both. The batch's is their sum, which is
divided by the number of pairs where the sums over tokens are, at the update.

Each rank has the vectors of all ranks, of length 1, and computes the losses of the pairs whose positive is its own. The
gradients of these with respect to all vectors are summed over ranks, and a rank goes on with those of its own. So each
term is in one rank's loss, and the sum is that of one process.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megavlm.config.schema import ObjectiveConfig
from megavlm.data.types import SOURCE
from megavlm.objective.cached import Loss, Representations, blocks, normalized, widths_of
from megavlm.objective.gather import gathered, gathered_members, longest, own_sum
from megavlm.objective.texts import Texts

_LARGEST = math.log(100.0)  # CLIP's bound of a learned 1/τ


def info_nce(own: Representations, options: ObjectiveConfig, group: dist.ProcessGroup) -> Loss:
    """Return this rank's share of the loss over the texts of all ranks of a group."""
    length = longest(len(own.members), group, own.members.device)
    members = gathered_members(own.members, length, group)
    texts = Texts(members)
    rows = texts.documents[texts.pairs[1]]
    mine = torch.nonzero(rows // max(length, 1) == group.rank()).flatten()
    vectors = own.vectors.detach().requires_grad_(True)
    scalars = own.scalars.detach().clone().requires_grad_(True)
    losses = torch.zeros(len(mine), dtype=torch.float64, device=vectors.device)
    for width in widths_of(options, vectors.shape[1]):
        unit = normalized(vectors, width)
        everyone = gathered(unit.detach(), length, group)
        gradient = _add_pairs(texts, everyone, scalars, options, pairs=mine, losses=losses)
        unit.backward(own_sum(gradient, len(unit), group))
    return Loss(
        losses=losses,
        sources=members[rows[mine], SOURCE],
        vectors=gradient_of(vectors),
        scalars=gradient_of(scalars),
    )


def _add_pairs(
    texts: Texts, unit: Tensor, scalars: Tensor, options: ObjectiveConfig, *, pairs: Tensor, losses: Tensor
) -> Tensor:
    """Add the losses of some of `texts.pairs` to `losses` [N], and the gradient of their sum to that of `scalars`;
    return it with respect to the vectors of length 1, [T, w].

    Scores are computed a block of pairs at a time, so that their memory does not grow with the square of the batch.
    """
    query, document = (each[pairs] for each in texts.pairs)
    asked, found = (unit[rows].requires_grad_(True) for rows in (texts.queries, texts.documents))
    gradient = torch.zeros_like(unit)
    for part in blocks(len(pairs), max(len(asked), len(found))):
        block = _block(texts, asked, found, query[part], document[part], scale_of(scalars, options), options)
        block.sum().backward()
        losses[part] += block.detach()
    gradient[texts.queries] = gradient_of(asked)
    gradient[texts.documents] = gradient_of(found)
    return gradient


def scale_of(scalars: Tensor, options: ObjectiveConfig) -> Tensor:
    """Return 1/τ, learned or fixed."""
    if not len(scalars):
        return torch.tensor(1 / options.temperature, dtype=torch.float64, device=scalars.device)
    return scalars[0].clamp(max=_LARGEST).exp()


def _block(
    texts: Texts,
    asked: Tensor,
    found: Tensor,
    query: Tensor,
    document: Tensor,
    scale: Tensor,
    options: ObjectiveConfig,
) -> Tensor:
    """Return the losses [n] of n pairs among all queries [Q, w] and documents [D, w], all of length 1."""
    forth = _ranked(scale * asked[query] @ found.t(), texts.answers(queries=query), document)
    if not options.symmetric:
        return forth
    back = _ranked(scale * found[document] @ asked.t(), texts.answers(documents=document).t(), query)
    return (forth + back) / 2


def _ranked(scores: Tensor, answers: Tensor, right: Tensor) -> Tensor:
    """Return the cross entropies [n] of scores [n, m] with the right one, in which other answers are left out."""
    others = answers.scatter(1, right[:, None], False)
    return F.cross_entropy(scores.masked_fill(others, -math.inf), right, reduction="none")


def gradient_of(leaf: Tensor) -> Tensor:
    """Return the gradient of a leaf; zeros if nothing depended on it."""
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
