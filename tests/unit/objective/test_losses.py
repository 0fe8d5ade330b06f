"""Losses over a batch and scores of retrieval, against definitions written pair by pair and query by query."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megavlm.arch.objectives import OBJECTIVES
from megavlm.config.schema import ObjectiveConfig
from megavlm.data.types import NEGATIVE, POSITIVE
from megavlm.objective import gather
from megavlm.objective.gather import Representations, retrieval_sums
from megavlm.objective.losses import info_nce, preference_loss, sigmoid_loss
from tests.support import plain_losses
from tests.support.plain_losses import Text, answers

ROLES = ("query", "positive", "negative")


class Alone:
    """A process group of one rank."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


ALONE: Any = Alone()


@st.composite
def batches(draw: st.DrawFn) -> list[Text]:
    """Records of one to three positives and up to two negatives, many of which are the same."""
    texts = []
    for record in range(draw(st.integers(1, 6))):
        identity = st.integers(0, 7)
        texts.append(Text(record, "query", 100 + record))
        texts += [Text(record, "positive", draw(identity)) for _ in range(draw(st.integers(1, 3)))]
        texts += [Text(record, "negative", draw(identity)) for _ in range(draw(st.integers(0, 2)))]
    return texts


def representations(texts: Sequence[Text], scalars: Sequence[float] = ()) -> Representations:
    """Random vectors, in float64."""
    generator = torch.Generator().manual_seed(len(texts))
    vectors = torch.randn(len(texts), 6, dtype=torch.float64, generator=generator)
    members = [(text.record, ROLES.index(text.role), text.identity, text.record % 2) for text in texts]
    return Representations(vectors, torch.tensor(members), torch.tensor(scalars, dtype=torch.float64))


@settings(max_examples=60, deadline=None)
@given(texts=batches(), symmetric=st.booleans(), learned=st.booleans(), widths=st.sampled_from([(), (2, 4)]))
def test_info_nce_and_its_gradients_are_those_of_its_definition(texts, symmetric, learned, widths) -> None:
    own = representations(texts, [0.7] if learned else [])
    options = ObjectiveConfig(
        kind="contrastive", temperature=0.3, symmetric=symmetric, matryoshka_widths=widths, learn_temperature=learned
    )
    found = info_nce(own, options, ALONE)
    vectors, scalars = own.vectors.clone().requires_grad_(), own.scalars.clone().requires_grad_()
    scale = scalars[0].exp() if learned else 1 / 0.3
    losses = plain_losses.info_nce(vectors, texts, scale=scale, symmetric=symmetric, widths=(*widths, 6))
    torch.stack(losses).sum().backward()
    torch.testing.assert_close(found.losses, torch.stack(losses).detach())
    torch.testing.assert_close(found.vectors, vectors.grad)
    if learned:
        torch.testing.assert_close(found.scalars, scalars.grad)


@settings(max_examples=60, deadline=None)
@given(texts=batches(), learned=st.booleans())
def test_the_sigmoid_loss_and_its_gradients_are_those_of_its_definition(texts, learned) -> None:
    own = representations(texts, [0.7, -1.5] if learned else [])
    options = ObjectiveConfig(kind="sigmoid", temperature=0.3, sigmoid_bias=-2.0, matryoshka_widths=(3,))
    found = sigmoid_loss(own, options, ALONE)
    vectors, scalars = own.vectors.clone().requires_grad_(), own.scalars.clone().requires_grad_()
    scale, bias = (scalars[0].exp(), scalars[1]) if learned else (1 / 0.3, -2.0)
    losses = plain_losses.sigmoid(vectors, texts, scale=scale, bias=bias, widths=(3, 6))
    torch.stack(losses).sum().backward()
    torch.testing.assert_close(found.losses, torch.stack(losses).detach())
    torch.testing.assert_close(found.vectors, vectors.grad)
    if learned:
        torch.testing.assert_close(found.scalars, scalars.grad)


@pytest.mark.parametrize("loss", [info_nce, sigmoid_loss])
@pytest.mark.parametrize(("answer", "stays"), [(1.0, True), (-1.0, False)])
def test_a_temperature_beyond_its_bound_comes_back(loss, answer: float, stays: bool) -> None:
    """Documents that are right ask for larger scores, wrong ones for smaller."""
    texts = [Text(record, role, 10 * record) for record in range(2) for role in ROLES[:2]]
    vectors = torch.tensor([[1.0, 0.0], [answer, 0.2], [-1.0, 0.0], [-answer, 0.2]], dtype=torch.float64)
    options = ObjectiveConfig(kind="contrastive", temperature=0.3, learn_temperature=True)
    found, at_bound = (
        loss(replace(representations(texts, [scale, 0.0]), vectors=vectors), options, ALONE)
        for scale in (math.log(100.0) + 0.5, math.log(100.0))
    )
    torch.testing.assert_close(found.losses, at_bound.losses)
    torch.testing.assert_close(found.scalars[0], at_bound.scalars[0] * (not stays))
    assert stays or found.scalars[0] > 0


@pytest.mark.parametrize("loss", [info_nce, sigmoid_loss])
def test_scores_of_a_block_at_a_time_give_the_same(loss, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [Text(record, role, 10 * record + k) for record in range(9) for k, role in enumerate(ROLES)]
    options = ObjectiveConfig(kind="contrastive", temperature=0.3)
    whole = loss(representations(texts), options, ALONE)
    monkeypatch.setattr(gather, "BLOCK", 40)  # two pairs
    parts = loss(representations(texts), options, ALONE)
    torch.testing.assert_close(parts.losses, whole.losses)
    torch.testing.assert_close(parts.vectors, whole.vectors)


def test_totals_are_those_of_each_data_set() -> None:
    texts = [Text(record, role, 10 * record + k) for record in range(3) for k, role in enumerate(ROLES)]
    found = info_nce(representations(texts), ObjectiveConfig(kind="contrastive", temperature=0.3), ALONE)
    a, b, c = found.losses.tolist()
    assert found.totals(2).tolist() == pytest.approx([a + b + c, 3, a + c, b, 2, 1])
    assert found.totals(0).tolist() == pytest.approx([a + b + c, 3])


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


def test_rated_answers_have_the_mean_rewards_of_each_kind() -> None:
    """Two good answers, of which one is no longer liked, and a bad one; then none that is bad."""
    options = ObjectiveConfig(kind="kto", beta=0.5, desirable_weight=2.0)
    roles, ratios = [POSITIVE, NEGATIVE, POSITIVE], torch.tensor([1.0, -2.0, -0.4], dtype=torch.float64)
    text = SimpleNamespace(
        pool=torch.tensor([[0, 1, 3, 5], [0, 0, 1, 2]]),
        members=torch.tensor([[number, role, number, number % 2] for number, role in enumerate(roles)]),
        reference=torch.tensor([-3.0, -3.0, -3.0], dtype=torch.float64) - ratios,
    )
    losses = torch.tensor([[1.0, 2.0, 9.0, 3.0, 9.0, 3.0]], dtype=torch.float64)
    total, count, sums = preference_loss(SimpleNamespace(text=text), 2, options, ALONE, losses)
    terms = [2 / (1 + math.exp(0.5)), 1 / (1 + math.exp(1.0)), 2 / (1 + math.exp(-0.2))]
    assert float(total) == pytest.approx(sum(terms))
    assert int(count) == 3
    assert sums[:6].tolist() == pytest.approx([sum(terms), 3, terms[0] + terms[2], terms[1], 2, 1])
    assert OBJECTIVES["kto"].means(sums[6:].tolist(), 3) == pytest.approx(
        {
            **{"reward_chosen": (0.5 - 0.2) / 2, "reward_rejected": -1.0, "reward_margin": 1.15},
            **{"reward_accuracy": 2 / 3, "chosen_share": 2 / 3, "answer_tokens": 4 / 3},
        }
    )
    assert OBJECTIVES["kto"].means([0.8, 0.0, 2.0, 1.0, 6.0], 2) == pytest.approx(
        {"reward_chosen": 0.4, "chosen_share": 1.0, "reward_accuracy": 0.5, "answer_tokens": 3.0}
    )
