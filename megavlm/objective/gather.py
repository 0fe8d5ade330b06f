"""Gather the embedded texts of a global batch from all ranks, for contrastive losses and retrieval scores.

Legend: R texts of this rank, L the largest R of all ranks, N ranks, H width, Q queries, D documents, P positives, I
the most positives of a query, T loss terms that this rank counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megavlm.config.schema import ObjectiveConfig
from megavlm.data.types import ID, NEGATIVE, PADDING, POSITIVE, QUERY, RECORD, ROLE

DEPTHS = (1, 5, 10)
SCORES = (*(f"recall_at_{k}" for k in DEPTHS), f"ndcg_at_{DEPTHS[-1]}", "mrr")

BLOCK = 2**21  # scores that a rank holds in memory at a time


@dataclass(frozen=True, eq=False)
class Representations:
    """Embedding vectors of this rank's texts in a global batch, and the learned scalars of the loss."""

    vectors: Tensor  # [R, H] fp32, not normalised
    members: Tensor  # [R, 4] int64, columns of `data/types.py`; records are numbered within this rank
    scalars: Tensor  # fp32, in the order of `Objective.learned`; none if they are fixed


@dataclass(frozen=True, eq=False)
class Loss:
    """This rank's terms of a loss over the global batch, and the gradient of the whole loss for this rank's vectors.

    The loss is a sum, not a mean: summed over all ranks, the terms are the loss of the batch, and the gradients of the
    scalars are the gradients of the batch.
    """

    losses: Tensor  # [T] float64
    sources: Tensor  # [T] int64: the data set of each term
    vectors: Tensor  # [R, H]: the gradient
    scalars: Tensor  # this rank's share of the gradient

    def totals(self, num_sources: int) -> Tensor:
        """Return sums [2 + 2·num_sources] float64 for `Schedule.train`: loss, number of terms, both also by source."""
        sums = self.losses.new_zeros(2, num_sources)
        if num_sources:
            sums[0].index_add_(0, self.sources, self.losses)
            sums[1].index_add_(0, self.sources, torch.ones_like(self.losses))
        whole = torch.stack([self.losses.sum(), torch.full_like(self.losses.sum(), len(self.losses))])
        return torch.cat([whole, sums.flatten()])


WholeBatchLoss = Callable[[Representations, ObjectiveConfig, dist.ProcessGroup], Loss]


def widths_of(options: ObjectiveConfig, width: int) -> tuple[int, ...]:
    """Return the widths to which a loss is applied: full width and Matryoshka prefixes (Kusupati et al. 2022)."""
    return tuple(sorted({*options.matryoshka_widths, width}))


def normalized(vectors: Tensor, width: int) -> Tensor:
    """Return the first `width` channels of `vectors`, normalised to length 1: [R, width]."""
    return F.normalize(vectors[:, :width], dim=-1)


def blocks(count: int, across: int) -> Iterator[slice]:
    """Yield consecutive ranges of `count` rows, each with at most `BLOCK` scores for `across` columns (or one row)."""
    size = max(1, BLOCK // max(across, 1))
    return (slice(start, min(start + size, count)) for start in range(0, count, size))


@dataclass(frozen=True, eq=False)
class Texts:
    """Roles and identities of the texts of a batch: [R, 4] int64, with the columns of `data/types.py`.

    Record numbers are unique in the whole batch. A row with none of the three roles is padding.
    """

    members: Tensor

    @cached_property
    def queries(self) -> Tensor:
        """Return the rows that are queries, [Q]."""
        return torch.nonzero(self.members[:, ROLE] == QUERY).flatten()

    @cached_property
    def documents(self) -> Tensor:
        """Return the rows that are documents, [D]: positives and negatives of all queries."""
        role = self.members[:, ROLE]
        return torch.nonzero((role == POSITIVE) | (role == NEGATIVE)).flatten()

    @cached_property
    def pairs(self) -> tuple[Tensor, Tensor]:
        """Return, for each positive, the index of its query in `queries` and its own index in `documents`, [P] each.

        Positives are in the order of their rows.
        """
        own = torch.nonzero(self.members[self.documents, ROLE] == POSITIVE).flatten()
        records, order = self.members[self.queries, RECORD].sort()
        return order[torch.searchsorted(records, self.members[self.documents[own], RECORD].contiguous())], own

    @cached_property
    def identities(self) -> Tensor:
        """Return the identity of each document, [D]."""
        return self.members[self.documents, ID]

    @cached_property
    def wanted(self) -> Tensor:
        """Return the identities of each query's positives, [Q, I], padded with −1."""
        query, document = self.pairs
        by_query = query.argsort(stable=True)
        counts = torch.bincount(query, minlength=len(self.queries))
        first = counts.cumsum(0) - counts
        place = torch.arange(len(by_query), device=query.device) - first[query[by_query]]
        table = query.new_full((len(self.queries), int(counts.max()) if len(query) else 0), -1)
        table[query[by_query], place] = self.identities[document[by_query]]
        return table

    def answers(self, queries: Tensor | slice = slice(None), documents: Tensor | slice = slice(None)) -> Tensor:
        """Return whether each document is, or is identical to, a positive of each query, [q, d] bool."""
        return same(self.wanted[queries], self.identities[documents])


def same(positives: Tensor, identities: Tensor) -> Tensor:
    """Return whether each document's identity is among each query's positive identities, [q, d] bool."""
    matches = torch.zeros(len(positives), len(identities), dtype=torch.bool, device=identities.device)
    for column in positives.unbind(1):
        matches |= column[:, None] == identities
    return matches


def longest(count: int, group: dist.ProcessGroup, device: torch.device) -> int:
    """Return the largest `count` over the ranks of a group (all-reduce)."""
    if group.size() == 1:
        return count
    counts = torch.tensor(count, device=device)
    dist.all_reduce(counts, op=dist.ReduceOp.MAX, group=group)
    return int(counts)


def gathered(own: Tensor, length: int, group: dist.ProcessGroup, *, padding: int = 0) -> Tensor:
    """All-gather the rows of all ranks, [N·L, …]; rank n's rows begin at n·L and are padded to `length` L."""
    if group.size() == 1:
        return own
    padded = own.new_full((length, *own.shape[1:]), padding)
    padded[: len(own)] = own
    everyone = own.new_empty(group.size() * length, *own.shape[1:])
    dist.all_gather_into_tensor(everyone, padded, group=group)
    return everyone


def gathered_members(members: Tensor, length: int, group: dist.ProcessGroup) -> Tensor:
    """All-gather the members of all texts, [N·L, 4], after making record numbers unique across ranks."""
    members = members.clone()
    members[:, RECORD] += group.rank() << 32
    return gathered(members, length, group, padding=PADDING)


def own_sum(gradients: Tensor, texts: int, group: dist.ProcessGroup) -> Tensor:
    """Reduce-scatter gradients [N·L, H] and return the sum for this rank's `texts` texts, [R, H]."""
    ranks = group.size()
    if ranks == 1:
        return gradients
    own = gradients.new_empty(len(gradients) // ranks, gradients.shape[1])
    dist.reduce_scatter_tensor(own, gradients, group=group)
    return own[:texts]


def retrieval_sums(vectors: Tensor, members: Tensor, queries: Tensor) -> dict[str, float]:
    """Return the sum of each retrieval score over `queries`, and the number of queries under the key `queries`.

    `vectors` [R, H] and `members` [R, 4] describe all texts; `queries` are indices into `Texts.queries`.
    """
    texts = Texts(members)
    rows = first_of_each(texts)
    documents, places = normalized(vectors[rows], vectors.shape[1]), torch.searchsorted(texts.documents, rows)
    sums = dict.fromkeys(SCORES, 0.0)
    for part in blocks(len(queries), len(rows)):
        unit = normalized(vectors[texts.queries[queries[part]]], vectors.shape[1])
        answers = texts.answers(queries=queries[part], documents=places)
        for name, values in _scores(answers, unit @ documents.t()).items():
            sums[name] += float(values.double().sum())
    return sums | {"queries": float(len(queries))}


def first_of_each(texts: Texts) -> Tensor:
    """Return the rows of distinct documents: the first row of each group of identical documents."""
    _, inverse = texts.identities.unique(return_inverse=True)
    places = torch.arange(len(inverse), device=inverse.device)
    first = places.new_full((int(inverse.max()) + 1 if len(inverse) else 0,), len(inverse))
    first.scatter_reduce_(0, inverse, places, "amin")
    return texts.documents[first.sort().values]


def _scores(answers: Tensor, scores: Tensor) -> Mapping[str, Tensor]:
    """Return the retrieval scores of n queries, [n] each, from `answers` and `scores` of all documents, [n, D].

    Of documents with equal scores, wrong documents rank first, so that ties never raise a score. The i-th best answer
    (from 0) thus has rank 1 + i + the number of wrong documents with at least its score.

    Recall@k is the share of answers within the first k; nDCG@k (Järvelin & Kekäläinen 2002) is the sum of
    1 / log2(1 + rank) over answers within the first k, divided by its maximum; MRR uses the rank of the first answer.
    """
    best, order = scores.masked_fill(~answers, -torch.inf).sort(dim=1, descending=True)
    is_answer = answers.gather(1, order)  # [n, D]: the answers first
    others = scores.masked_fill(answers, -torch.inf).sort(dim=1).values
    better = others.shape[1] - torch.searchsorted(others, best.contiguous())
    place = torch.arange(answers.shape[1], device=scores.device)
    ranks = (1 + place + better).masked_fill(~is_answer, len(place) + 1).double()
    count = answers.sum(1).clamp(min=1)
    share = count.double()
    recalls = {f"recall_at_{k}": ((ranks <= k) & is_answer).sum(1) / share for k in DEPTHS}
    k = DEPTHS[-1]
    gains = ((1 / torch.log2(1 + ranks)) * (is_answer & (ranks <= k))).sum(1)
    ideal = (1 / torch.log2(2 + place.double())).cumsum(0)[(count.clamp(max=k) - 1).clamp(max=len(place) - 1)]
    return {**recalls, f"ndcg_at_{k}": gains / ideal, "mrr": 1 / ranks[:, 0]}
