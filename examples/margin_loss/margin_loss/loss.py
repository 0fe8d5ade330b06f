"""The loss: Σ over pairs of max(0, margin − s(q,p) + max_d s(q,d)), with cosines s and documents d that do not answer q
(batch-hard triplets, Hermans et al. 2017).
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist

from megavlm.config.schema import ObjectiveConfig
from megavlm.data.types import SOURCE
from megavlm.objective.gather import (
    Loss,
    Representations,
    Texts,
    gathered,
    gathered_members,
    longest,
    normalized,
    own_sum,
    widths_of,
)


def margin(own: Representations, options: ObjectiveConfig, group: dist.ProcessGroup) -> Loss:
    """Return this rank's share of the loss over the texts of all ranks: the pairs whose positive is its own."""
    length = longest(len(own.members), group, own.members.device)
    everyone, members = gathered(own.vectors, length, group), gathered_members(own.members, length, group)
    texts = Texts(members)
    rows = texts.documents[texts.pairs[1]]
    mine = torch.nonzero(rows // max(len(members) // group.size(), 1) == group.rank()).flatten()
    query, document = (indices[mine] for indices in texts.pairs)
    vectors = everyone.detach().clone().requires_grad_(True)
    losses = vectors.new_zeros(len(mine))
    for width in widths_of(options, vectors.shape[1]):
        unit = normalized(vectors, width)
        scores = unit[texts.queries[query]] @ unit[texts.documents].t()
        right = scores.gather(1, document[:, None]).squeeze(1)
        wrong = scores.masked_fill(texts.answers(queries=query), -math.inf).amax(1)
        losses = losses + (options.losses.margin.width - right + wrong).clamp(min=0)
    losses.sum().backward()
    gradient = torch.zeros_like(vectors) if vectors.grad is None else vectors.grad
    return Loss(
        losses=losses.detach().double(),
        sources=members[rows[mine], SOURCE],
        vectors=own_sum(gradient, len(own.vectors), group),
        scalars=torch.zeros_like(own.scalars),
    )
