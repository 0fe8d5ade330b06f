"""Losses over a batch, their gradients and masks against definitions that are written pair by pair, in float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megavlm.config.schema import ObjectiveConfig
from megavlm.objective import gather
from megavlm.objective.gather import Representations
from megavlm.objective.losses import info_nce, sigmoid_loss
from tests.support import plain_losses
from tests.support.plain_losses import Text

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
