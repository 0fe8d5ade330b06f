"""Losses of embeddings written pair by pair, as their definitions read, to compare others with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Text(NamedTuple):
    """A text of a batch; `role` is query, positive or negative."""

    record: int
    role: str
    identity: int


def answers(texts: Sequence[Text], query: int, document: int) -> bool:
    """Return whether a document is a positive of a query, or the same as one."""
    wanted = {text.identity for text in texts if text.record == texts[query].record and text.role == "positive"}
    return texts[document].identity in wanted


def pairs_of(texts: Sequence[Text]) -> list[tuple[int, int]]:
    """Return the rows of each positive's query and of itself."""
    query_of = {text.record: row for row, text in enumerate(texts) if text.role == "query"}
    return [(query_of[text.record], row) for row, text in enumerate(texts) if text.role == "positive"]


def info_nce(
    vectors: Tensor, texts: Sequence[Text], *, scale: Tensor | float, symmetric: bool, widths: Sequence[int]
) -> list[Tensor]:
    """Return the loss of each pair."""
    queries = [row for row, text in enumerate(texts) if text.role == "query"]
    documents = [row for row, text in enumerate(texts) if text.role != "query"]
    losses = [vectors.new_zeros(()) for _ in pairs_of(texts)]
    for width in widths:
        unit = vectors[:, :width] / vectors[:, :width].norm(dim=1, keepdim=True)
        scores = scale * unit @ unit.t()
        for number, (query, positive) in enumerate(pairs_of(texts)):
            others = [row for row in documents if not answers(texts, query, row)]
            loss = scores[query, [positive, *others]].logsumexp(0) - scores[query, positive]
            if symmetric:
                rivals = [row for row in queries if not answers(texts, row, positive)]
                loss = (loss + scores[[query, *rivals], positive].logsumexp(0) - scores[query, positive]) / 2
            losses[number] = losses[number] + loss
    return losses


def sigmoid(
    vectors: Tensor, texts: Sequence[Text], *, scale: Tensor | float, bias: Tensor | float, widths: Sequence[int]
) -> list[Tensor]:
    """Return the loss of each query."""
    queries = [row for row, text in enumerate(texts) if text.role == "query"]
    documents = [row for row, text in enumerate(texts) if text.role != "query"]
    right = set(pairs_of(texts))
    losses = [vectors.new_zeros(()) for _ in queries]
    for width in widths:
        unit = vectors[:, :width] / vectors[:, :width].norm(dim=1, keepdim=True)
        logits = scale * unit @ unit.t() + bias
        for number, query in enumerate(queries):
            for row in documents:
                if (query, row) in right or not answers(texts, query, row):
                    sign = 1 if (query, row) in right else -1
                    losses[number] = losses[number] - torch.nn.functional.logsigmoid(sign * logits[query, row])
    return losses
