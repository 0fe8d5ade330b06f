"""Scores of retrieval against definitions that rank one query at a time."""

from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megavlm.objective.gather import retrieval_sums
from tests.support.plain_losses import Text, answers

ROLES = ("query", "positive", "negative")


def scores_of(vectors: torch.Tensor, texts: list[Text], query: int) -> dict[str, float]:
    """What `retrieval_sums` adds up, from a sorted list."""
    different: dict[int, int] = {}
    for row, text in enumerate(texts):
        if text.role != "query":
            different.setdefault(text.identity, row)
    unit = vectors / vectors.norm(dim=1, keepdim=True)
    listed = [(float(unit[query] @ unit[row]), answers(texts, query, row)) for row in different.values()]
    listed.sort(key=lambda each: (-each[0], each[1]))
    right = [place for place, each in enumerate(listed, 1) if each[1]]
    found = {f"recall_at_{k}": sum(place <= k for place in right) / len(right) for k in (1, 5, 10)}
    ideal = sum(1 / math.log2(1 + place) for place in range(1, min(len(right), 10) + 1))
    found["ndcg_at_10"] = sum(1 / math.log2(1 + place) for place in right if place <= 10) / ideal
    return found | {"mrr": 1 / right[0], "queries": 1.0}


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_scores_are_those_of_their_definitions(data: st.DataObject) -> None:
    texts = []
    for record in range(data.draw(st.integers(1, 12))):
        texts.append(Text(record, "query", 1000 + record))
        texts += [Text(record, "positive", data.draw(st.integers(0, 20))) for _ in range(data.draw(st.integers(1, 3)))]
        texts += [Text(record, "negative", data.draw(st.integers(0, 20))) for _ in range(data.draw(st.integers(0, 2)))]
    # Few different vectors, so that scores are often equal; those of one identity have one vector.
    kinds = [data.draw(st.integers(0, 3)) for _ in range(21)]
    points = torch.tensor([[1.0, 0, 0], [0, 1.0, 0], [0, 0, 1.0], [1.0, 1.0, 0]], dtype=torch.float64)
    chosen = [text.record % 4 if text.role == "query" else kinds[text.identity] for text in texts]
    vectors = points[chosen]
    members = torch.tensor([(text.record, ROLES.index(text.role), text.identity, 0) for text in texts])
    queries = [row for row, text in enumerate(texts) if text.role == "query"]
    found = retrieval_sums(vectors, members, torch.arange(len(queries)))
    expected = [scores_of(vectors, texts, query) for query in queries]
    for name, value in found.items():
        assert math.isclose(value, sum(each[name] for each in expected), abs_tol=1e-9), name


def test_equal_vectors_find_nothing() -> None:
    """A model that collapsed scores as badly as can be, not as well."""
    members = torch.tensor([(k // 2, k % 2, k, 0) for k in range(40)])
    found = retrieval_sums(torch.ones(40, 3), members, torch.arange(20))
    assert found["recall_at_10"] == 0
    assert found["mrr"] == 20 / 20
