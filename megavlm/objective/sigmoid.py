"""The sigmoid loss over a global batch (Zhai et al. 2023, SigLIP), documents passed around a ring of ranks.

With cosines s of all queries q and documents d, a learned scale t and bias b, and y = 1 for a positive of q, else −1:

    L = Σ_q Σ_d −log σ( y·(t·s(q,d) + b) )

without documents that are the same as a positive of q; L is divided by the number of queries. Terms need no other
terms, so a rank needs one block of documents at a time: its own first, then those of the rank before it, and so on. The
gradient of a block travels with it and arrives at home complete. A rank has at most two blocks, the one that it
computes with and the one that arrives.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megavlm.config.schema import ObjectiveConfig
from megavlm.data.types import ID, PADDING, POSITIVE, RECORD, ROLE, SOURCE
from megavlm.objective.cached import Loss, Representations, blocks, normalized, widths_of
from megavlm.objective.contrastive import gradient_of, scale_of
from megavlm.objective.gather import longest
from megavlm.objective.texts import Texts, same


@dataclass(frozen=True, eq=False)
class Block:
    """The documents of one rank: vectors [D, H], members [D, 4], and the sum of gradients [D, H] so far."""

    vectors: Tensor
    members: Tensor
    gradient: Tensor


def sigmoid_loss(own: Representations, options: ObjectiveConfig, group: dist.ProcessGroup) -> Loss:
    """Return this rank's share of the loss over the texts of all ranks of a group."""
    texts = Texts(own.members)
    asked = own.vectors[texts.queries].detach().clone().requires_grad_(True)
    scalars = own.scalars.detach().clone().requires_grad_(True)
    block = _padded(own.vectors[texts.documents], own.members[texts.documents], group)
    losses = torch.zeros(len(asked), dtype=torch.float64, device=asked.device)
    for turn in range(group.size()):
        losses += _add_terms(texts, asked, block, scalars, options, home=turn == 0)
        block = _passed_on(block, group)
    gradient = torch.zeros_like(own.vectors)
    gradient[texts.queries] = gradient_of(asked)
    gradient[texts.documents] = block.gradient[: len(texts.documents)]
    sources = own.members[texts.queries, SOURCE]
    return Loss(losses=losses, sources=sources, vectors=gradient, scalars=gradient_of(scalars))


def _add_terms(
    texts: Texts, asked: Tensor, block: Block, scalars: Tensor, options: ObjectiveConfig, *, home: bool
) -> Tensor:
    """Return the sums [Q] of the terms of this rank's queries with a block, and add their gradients to all that they
    depend on. Records of the `home` block are numbered as the queries' are.
    """
    losses = torch.zeros(len(asked), dtype=torch.float64, device=asked.device)
    records = texts.members[texts.queries, RECORD]
    for width in widths_of(options, asked.shape[1]):
        for part in blocks(len(asked), len(block.vectors)):
            found = block.vectors.detach().requires_grad_(True)
            scores = normalized(asked[part], width) @ normalized(found, width).t()
            bias = scalars[1] if len(scalars) else options.sigmoid_bias
            logits = scores * scale_of(scalars, options) + bias
            answers = same(texts.wanted[part], block.members[:, ID])
            positive = home & (block.members[:, ROLE] == POSITIVE)
            right = positive & (records[part, None] == block.members[:, RECORD])
            left_out = (answers & ~right) | (block.members[:, ROLE] == PADDING)
            terms = -F.logsigmoid(torch.where(right, logits, -logits)).masked_fill(left_out, 0.0)
            terms.sum().backward()
            block.gradient.add_(gradient_of(found))
            losses[part] += terms.detach().sum(1)
    return losses


def _padded(vectors: Tensor, members: Tensor, group: dist.ProcessGroup) -> Block:
    """Return a rank's documents as a block that is as long as the longest of all ranks."""
    missing = longest(len(vectors), group, vectors.device) - len(vectors)
    vectors = F.pad(vectors.detach(), (0, 0, 0, missing))
    return Block(vectors, F.pad(members, (0, 0, 0, missing), value=PADDING), torch.zeros_like(vectors))


def _passed_on(block: Block, group: dist.ProcessGroup) -> Block:
    """Send a block to the next rank of the ring, and return that of the rank before."""
    ranks, rank = group.size(), group.rank()
    if ranks == 1:
        return block
    after, before = (dist.get_global_rank(group, (rank + step) % ranks) for step in (1, ranks - 1))
    sent = (torch.cat([block.vectors, block.gradient], dim=1), block.members)
    received = tuple(map(torch.empty_like, sent))
    operations = [dist.P2POp(dist.isend, each, after, group) for each in sent]
    operations += [dist.P2POp(dist.irecv, each, before, group) for each in received]
    for request in dist.batch_isend_irecv(operations):
        request.wait()
    vectors, gradient = received[0].chunk(2, dim=1)
    return Block(vectors.contiguous(), received[1], gradient.contiguous())
