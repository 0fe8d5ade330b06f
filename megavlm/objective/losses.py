"""Losses: next-token, preference (DPO, IPO, SimPO, ORPO, KTO, reward), contrastive over a batch (InfoNCE, sigmoid).

**InfoNCE** (van den Oord et al. 2018; CLIP, DPR), distributed over ranks. For a query q and a positive p of q, with
cosines s and temperature τ:

    ℓ(q→p) = −s(q,p)/τ + log( e^{s(q,p)/τ} + Σ_d e^{s(q,d)/τ} )

over all documents d of the batch that do not answer q: positives and hard negatives of all queries, except documents
identical to a positive of q. In the other direction, over all queries i that p does not answer,

    ℓ(p→q) = −s(q,p)/τ + log( e^{s(q,p)/τ} + Σ_i e^{s(i,p)/τ} )

The loss of a pair is ℓ(q→p), or with `model.objective.symmetric` the mean of both directions. The loss of the batch is
the sum over pairs, which is divided by the number of pairs at the update, like sums over tokens.

Each rank gathers the normalised vectors of all ranks, and computes the losses of the pairs whose positive is on this
rank. A reduce-scatter sums the gradients with respect to all vectors, and each rank backpropagates the gradients of its
own vectors. So each term is in one rank's loss, and the sum over ranks equals the loss of a single process.

**Sigmoid** (Zhai et al. 2023, SigLIP), documents passed around a ring of ranks. With cosines s of all queries
q and documents d, a learned scale t and bias b, and y = 1 for a positive of q, else −1:

    L = Σ_q Σ_d −log σ( y·(t·s(q,d) + b) )

without other documents that are identical to a positive of q; L is divided by the number of queries. Terms are
independent, so a rank needs one block of documents at a time: first its own, then the previous rank's, and so on. The
gradient of a block is sent with the block, and is complete when the block returns. A rank holds at most two blocks:
the block in use and the block being received.

**Pairs of answers** have one loss per pair; the loss of a batch is the sum. For a prompt x with the chosen answer w and
the rejected answer l, log π(y) is the log-probability of all tokens of an answer y, the last turn; |y| is the number of
tokens, π₀ the model at the start of the run, ε `label_smoothing`, σ the sigmoid.

    DPO (Rafailov et al. 2023, with smoothed labels as Mitchell 2023)
        −(1 − ε) log σ(β h) − ε log σ(−β h)            h = log π(w)/π₀(w) − log π(l)/π₀(l)
    IPO (Azar et al. 2024, of means over tokens)
        (h − 1/(2β))²                                  h = log π(w)/π₀(w) / |w| − log π(l)/π₀(l) / |l|
    SimPO (Meng et al. 2024)
        −(1 − ε) log σ(β h − γ) − ε log σ(γ − β h)     h = log π(w) / |w| − log π(l) / |l|
    ORPO (Hong et al. 2024)
        −log p(w) − β log σ(log o(w) − log o(l))       log p(y) = log π(y) / |y|,  o = p / (1 − p)

`rpo_alpha` is the weight of an added term −log π(w) / |w| (Pang et al. 2024). A pair is in one micro-batch, so that
sums over micro-batches and ranks, divided by the number of pairs, are the same at any layout.

TRL has the same losses and gradients for a pair (`tests/unit/objective/test_trl.py`), except that its ORPO adds the
cross entropy of the prompt to that of the answer. Of several pairs, it averages cross entropies (ORPO, `rpo_alpha`)
over the tokens of a micro-batch, not over answers. Its `robust` (Chowdhury et al. 2024) uses ε in another way.

A **reward head** gives each answer a score r, from the hidden state of the last token of its conversation, and a pair
the loss of Bradley and Terry (Ouyang et al. 2022) with the record's margin m, if it has one (Touvron et al. 2023), and
with a term that keeps scores near 0, because the first sees their difference alone (Eisenstein et al. 2023). c is
`center_rewards`.

    −log σ(r(w) − r(l) − m) + c (r(w) + r(l))²

**Rated answers** have one loss per answer; the sum is divided by the number of answers. λ is `desirable_weight`.

    KTO (Ethayarajh et al. 2024) with z₀ = 0
        λ (1 − σ(β h)) for a good answer y, 1 − σ(−β h) for a bad answer y      h = log π(y)/π₀(y)

This is `apo_zero_unpaired` of TRL's KTOTrainer. TRL's `kto` subtracts from h a z₀ ≥ 0 without gradient, the mean of h
over a batch of prompts with the answers of other prompts: this needs one more forward pass, and the loss depends on
which records share a batch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megavlm.arch.objectives import OBJECTIVES
from megavlm.config.registry import Entry, registered
from megavlm.config.schema import ObjectiveConfig
from megavlm.data.types import ID, PADDING, POSITIVE, RECORD, ROLE, SOURCE
from megavlm.inputs.batch import MicroBatch
from megavlm.objective.gather import (
    Loss,
    Representations,
    Texts,
    WholeBatchLoss,
    blocks,
    gathered,
    gathered_members,
    longest,
    normalized,
    own_sum,
    same,
    widths_of,
)

_LARGEST = math.log(100.0)  # CLIP's upper bound of a learned log(1/τ)


def next_token(
    batch: MicroBatch, num_sources: int, further_weight: float, losses: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the summed cross entropy of trained tokens, the number of trained tokens, and sums for `Schedule.train`.

    `losses` are cross entropies [B, S]; the sums are [2 + 2·num_sources]. With D multi-token prediction layers,
    `losses` are [(1 + D)·B, S], the mean over these layers of their summed losses is added to the loss with weight
    `further_weight` (λ/D · Σ_k L_k of DeepSeek-V3, whose L_k are also divided by the number of trained tokens), and
    the mean is appended to the sums.
    """
    rows = len(batch.text.tokens)
    mask = batch.text.loss_mask[:rows]
    masked = losses[:rows] * mask
    total, tokens = masked.sum(), mask.sum()
    parts = [torch.stack([total.detach().double(), tokens.double()])]
    if batch.text.sources is not None:
        for values in (masked.detach(), mask):
            sums = torch.zeros(num_sources, dtype=torch.float64, device=mask.device)
            parts.append(sums.index_add_(0, batch.text.sources.flatten(), values.flatten().double()))
    if len(losses) > rows:
        further = (losses[rows:] * batch.text.loss_mask[rows:]).sum() / (len(losses) // rows - 1)
        total = total + further_weight * further
        parts.append(further.detach().double()[None])
    return total, tokens.int(), torch.cat(parts)


def info_nce(own: Representations, options: ObjectiveConfig, group: dist.ProcessGroup) -> Loss:
    """Compute this rank's terms of the InfoNCE loss over the texts of all ranks of a group, and the gradients."""
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
        scalars=_inward(gradient_of(scalars), own.scalars, group),
    )


def _add_pairs(
    texts: Texts, unit: Tensor, scalars: Tensor, options: ObjectiveConfig, *, pairs: Tensor, losses: Tensor
) -> Tensor:
    """Add the losses of `pairs`, indices into `texts.pairs`, to `losses` [T]; return the gradient of the sum, [N·L, w].

    The gradient is with respect to the unit vectors `unit`. The gradient with respect to `scalars` is accumulated in
    `scalars.grad`.

    Scores are computed for a block of pairs at a time, so that memory does not grow with the square of the batch.
    """
    query, document = (indices[pairs] for indices in texts.pairs)
    queries, documents = (unit[rows].requires_grad_(True) for rows in (texts.queries, texts.documents))
    gradient = torch.zeros_like(unit)
    for part in blocks(len(pairs), max(len(queries), len(documents))):
        block = _block(texts, queries, documents, query[part], document[part], scale_of(scalars, options), options)
        block.sum().backward()
        losses[part] += block.detach()
    gradient[texts.queries] = gradient_of(queries)
    gradient[texts.documents] = gradient_of(documents)
    return gradient


def scale_of(scalars: Tensor, options: ObjectiveConfig) -> Tensor:
    """Return the inverse temperature 1/τ, learned (at most 100) or fixed.

    The gradient is that at the bound also beyond it; `_inward` removes it where it points further out.
    """
    if not len(scalars):
        return torch.tensor(1 / options.temperature, dtype=torch.float64, device=scalars.device)
    beyond = (scalars[0] - _LARGEST).relu().detach()
    return (scalars[0] - beyond).exp()


def _inward(gradient: Tensor, scalars: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's gradient of the learned scalars, without that of a log(1/τ) beyond its bound that the sum over
    ranks would move further out.
    """
    if not len(scalars):
        return gradient
    total = gradient[:1].clone()
    if group.size() > 1:
        dist.all_reduce(total, group=group)
    outward = (scalars[:1] > _LARGEST) & (total < 0)
    return torch.cat([gradient[:1].masked_fill(outward, 0.0), gradient[1:]])


def _block(
    texts: Texts,
    queries: Tensor,
    documents: Tensor,
    query: Tensor,
    document: Tensor,
    scale: Tensor,
    options: ObjectiveConfig,
) -> Tensor:
    """Return the InfoNCE losses [n] of n pairs, against all queries [Q, w] and documents [D, w], all of length 1."""
    forth = _ranked(scale * queries[query] @ documents.t(), texts.answers(queries=query), document)
    if not options.symmetric:
        return forth
    back = _ranked(scale * documents[document] @ queries.t(), texts.answers(documents=document).t(), query)
    return (forth + back) / 2


def _ranked(scores: Tensor, answers: Tensor, right: Tensor) -> Tensor:
    """Return the cross entropy [n] of scores [n, m] with target column `right`; other answers are masked out."""
    others = answers.scatter(1, right[:, None], False)
    return F.cross_entropy(scores.masked_fill(others, -math.inf), right, reduction="none")


def gradient_of(leaf: Tensor) -> Tensor:
    """Return the gradient of a leaf tensor; zeros if it has none."""
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad


@dataclass(frozen=True, eq=False)
class LossBlock:
    """Documents of one rank, sent around the ring: vectors [D, H], members [D, 4], accumulated gradient [D, H]."""

    vectors: Tensor
    members: Tensor
    gradient: Tensor


def sigmoid_loss(own: Representations, options: ObjectiveConfig, group: dist.ProcessGroup) -> Loss:
    """Compute this rank's terms of the sigmoid loss over the texts of all ranks of a group, and the gradients."""
    texts = Texts(own.members)
    queries = own.vectors[texts.queries].detach().clone().requires_grad_(True)
    scalars = own.scalars.detach().clone().requires_grad_(True)
    block = _padded(own.vectors[texts.documents], own.members[texts.documents], group)
    losses = torch.zeros(len(queries), dtype=torch.float64, device=queries.device)
    for turn in range(group.size()):
        losses += _add_terms(texts, queries, block, scalars, options, home=turn == 0)
        block = _passed_on(block, group)
    gradient = torch.zeros_like(own.vectors)
    gradient[texts.queries] = gradient_of(queries)
    gradient[texts.documents] = block.gradient[: len(texts.documents)]
    sources = own.members[texts.queries, SOURCE]
    learned = _inward(gradient_of(scalars), own.scalars, group)
    return Loss(losses=losses, sources=sources, vectors=gradient, scalars=learned)


def _add_terms(
    texts: Texts, queries: Tensor, block: LossBlock, scalars: Tensor, options: ObjectiveConfig, *, home: bool
) -> Tensor:
    """Return the sum of each query's sigmoid loss terms with a block, [Q], and accumulate the gradients of all inputs.

    `home`: the block is this rank's own, so that its record numbers match those of the queries.
    """
    losses = torch.zeros(len(queries), dtype=torch.float64, device=queries.device)
    records = texts.members[texts.queries, RECORD]
    for width in widths_of(options, queries.shape[1]):
        for part in blocks(len(queries), len(block.vectors)):
            documents = block.vectors.detach().requires_grad_(True)
            scores = normalized(queries[part], width) @ normalized(documents, width).t()
            bias = scalars[1] if len(scalars) else options.sigmoid_bias
            logits = scores * scale_of(scalars, options) + bias
            answers = same(texts.wanted[part], block.members[:, ID])
            positive = home & (block.members[:, ROLE] == POSITIVE)
            right = positive & (records[part, None] == block.members[:, RECORD])
            left_out = (answers & ~right) | (block.members[:, ROLE] == PADDING)
            terms = -F.logsigmoid(torch.where(right, logits, -logits)).masked_fill(left_out, 0.0)
            terms.sum().backward()
            block.gradient.add_(gradient_of(documents))
            losses[part] += terms.detach().sum(1)
    return losses


def _padded(vectors: Tensor, members: Tensor, group: dist.ProcessGroup) -> LossBlock:
    """Return this rank's documents as a block, padded to the length of the longest block of all ranks."""
    missing = longest(len(vectors), group, vectors.device) - len(vectors)
    vectors = F.pad(vectors.detach(), (0, 0, 0, missing))
    return LossBlock(vectors, F.pad(members, (0, 0, 0, missing), value=PADDING), torch.zeros_like(vectors))


def _passed_on(block: LossBlock, group: dist.ProcessGroup) -> LossBlock:
    """Send a block to the next rank of the ring, and return the block of the previous rank."""
    ranks, rank = group.size(), group.rank()
    if ranks == 1:
        return block
    after, before = (dist.get_global_rank(group, (rank + step) % ranks) for step in (1, ranks - 1))
    sent = (torch.cat([block.vectors, block.gradient], dim=1), block.members)
    received = tuple(map(torch.empty_like, sent))
    operations = [dist.P2POp(dist.isend, tensor, after, group) for tensor in sent]
    operations += [dist.P2POp(dist.irecv, tensor, before, group) for tensor in received]
    for request in dist.batch_isend_irecv(operations):
        request.wait()
    vectors, gradient = received[0].chunk(2, dim=1)
    return LossBlock(vectors.contiguous(), received[1], gradient.contiguous())


class _OverParts(torch.autograd.Function):
    """Sum over context-parallel ranks. The backward pass is the identity: every rank has the gradient of the sum."""

    @staticmethod
    def forward(ctx: object, own: Tensor, group: dist.ProcessGroup) -> Tensor:
        whole = own.clone()
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def answer_log_probabilities(batch: MicroBatch, losses: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """Return the log-probability and the number of tokens of each answer of a micro-batch: [R] float64 each.

    `losses` [B, S] are the cross entropies of this rank's part of the rows; the context-parallel `group` has all parts.
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
    """Return the summed loss of the pairs or rated answers of a micro-batch, their number, and the sums for
    `Schedule.train`. `losses` are cross entropies [B, S], or of a reward head the scores [R] of the answers.

    The sums are [2 + 2·num_sources + measures]: first as in `next_token`, then the metrics of `Objective.measured`. All
    context-parallel ranks compute the same loss; number and sums are zero on all but the first.
    """
    reference, members = batch.text.reference, batch.text.members
    assert members is not None
    assert reference is not None or not OBJECTIVES[options.kind].refers, "the data loader has read the references"
    tokens: list[Tensor] = []
    if options.kind == "reward":
        assert reference is not None
        rewards = losses.double().unflatten(0, (-1, 2))
        leads = rewards - reference.unflatten(0, (-1, 2))
        terms = -F.logsigmoid(leads[:, 0] - leads[:, 1]) + options.center_rewards * rewards.sum(1) ** 2
    else:
        logs, lengths = answer_log_probabilities(batch, losses, group)
        before, tokens = torch.zeros_like(logs) if reference is None else reference, [lengths.sum()]
        if options.kind != "kto":
            terms, rewards = pair_losses(logs, lengths, before, options)
    if options.kind == "kto":
        good = members[:, ROLE] == POSITIVE
        terms, rewards = rated_losses(logs - before, good, options)
        signed = torch.where(good, rewards, -rewards)
        measured = [rewards[good].sum(), rewards[~good].sum(), good.sum()]
    else:
        members = members[::2]
        signed = rewards[:, 0] - rewards[:, 1]
        measured = [*rewards.sum(0), signed.sum()]
    measured += [(signed > 0).sum(), *tokens]
    total = terms.sum() + 0.0 * losses.sum()  # a micro-batch without answers has gradients, too
    parts = [torch.stack([terms.sum(), terms.new_tensor(len(terms))])]
    if num_sources:
        for values in (terms, torch.ones_like(terms)):
            parts.append(values.new_zeros(num_sources).index_add(0, members[:, SOURCE], values))
    sums = torch.cat([*parts, torch.stack([each.double() for each in measured])]).detach()
    first = group.rank() == 0
    count = torch.tensor(len(terms) if first else 0, dtype=torch.int, device=losses.device)
    return total.to(losses.dtype), count, sums if first else torch.zeros_like(sums)


def pair_losses(logs: Tensor, lengths: Tensor, reference: Tensor, options: ObjectiveConfig) -> tuple[Tensor, Tensor]:
    """Return the loss of each pair, [P], and the rewards of its answers, [P, 2].

    `logs`, `lengths` and `reference` are log-probabilities, numbers of tokens and reference log-probabilities of
    answers, [2·P] each, in the order chosen, rejected. Rewards are β · log π/π₀, or β · log π / |y| without a
    reference.
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


def rated_losses(ratios: Tensor, good: Tensor, options: ObjectiveConfig) -> tuple[Tensor, Tensor]:
    """Return the KTO loss and reward of each answer, [R] each, from log π/π₀ [R] and the mask of good answers [R]."""
    rewards = options.beta * ratios
    losses = torch.where(good, options.desirable_weight * torch.sigmoid(-rewards), torch.sigmoid(rewards))
    return losses, rewards.detach()


def _smoothed(logits: Tensor, smoothing: float) -> Tensor:
    return -(1 - smoothing) * F.logsigmoid(logits) - smoothing * F.logsigmoid(-logits)


WHOLE_BATCH: Mapping[str, WholeBatchLoss] = {"contrastive": info_nce, "sigmoid": sigmoid_loss}

if WHOLE_BATCH.keys() != {name for name, objective in OBJECTIVES.items() if objective.embeds}:
    raise TypeError("each objective of embeddings needs a loss over the whole batch")


def whole_batch(kind: str) -> WholeBatchLoss:
    """Return the loss function of an embedding objective, built in or registered by an extension."""
    if kind in WHOLE_BATCH:
        return WHOLE_BATCH[kind]
    entry = registered("objectives")[kind]
    assert isinstance(entry, Entry), kind
    return entry.load()
