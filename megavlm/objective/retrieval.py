"""Retrieval scores: how high the documents that answer a query rank among all documents.

Legend: Q queries, D documents, no two of which are the same.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from megavlm.objective.gather import Texts, blocks, normalized

DEPTHS = (1, 5, 10)
SCORES = (*(f"recall_at_{k}" for k in DEPTHS), f"ndcg_at_{DEPTHS[-1]}", "mrr")


def retrieval_sums(vectors: Tensor, members: Tensor, queries: Tensor) -> dict[str, float]:
    """Return the sum of each score over some queries of the batch, and the number of queries (`queries`).

    `vectors` [R, H] and `members` [R, 4] are those of all texts, `queries` which of its queries to look at.
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
    """Return the rows of the documents, and of identical documents the first alone."""
    _, inverse = texts.identities.unique(return_inverse=True)
    places = torch.arange(len(inverse), device=inverse.device)
    first = places.new_full((int(inverse.max()) + 1 if len(inverse) else 0,), len(inverse))
    first.scatter_reduce_(0, inverse, places, "amin")
    return texts.documents[first.sort().values]


def _scores(answers: Tensor, scores: Tensor) -> Mapping[str, Tensor]:
    """Return each score of n queries, [n], from the answers and the scores of all documents, [n, D].

    Of documents with equal scores those that do not answer come first, so that equal vectors find nothing. The i-th
    best answer then has rank 1 + i + the number of others with at least its score.

    Recall@k is the share of answers within the first k; nDCG@k (Järvelin & Kekäläinen 2002) discounts them by
    1 / log2(1 + rank), divided by the largest such sum; the reciprocal rank is that of the first answer.
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
