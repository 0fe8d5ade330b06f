"""DeepStack's features travel in one tensor, and are added where their tokens are."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megavlm.arch.layers import carried_features
from megavlm.model.language import add_features, pack, unpack


@given(st.integers(0, 3), st.integers(1, 4), st.integers(1, 3), st.integers(1, 5))
def test_unpack_undoes_pack(count: int, length: int, samples: int, features: int) -> None:
    hidden = torch.randn(length, samples, 6)
    carried = [torch.randn(features, 1, 4) for _ in range(count)]
    packed = pack(hidden, carried)
    assert packed.dim() == 3
    assert (packed is hidden) == (not carried)
    same, parts = unpack(packed, hidden=(samples, 6), carried=[(features, 1, 4)] * count)
    assert torch.equal(same, hidden)
    assert len(parts) == count
    assert all(torch.equal(part, sent) for part, sent in zip(parts, carried, strict=True))


def test_gradients_return_to_what_was_packed() -> None:
    hidden, feature = (torch.randn(size, requires_grad=True) for size in ((3, 2, 4), (5, 1, 2)))
    _, (received,) = unpack(pack(hidden, [feature]), hidden=(2, 4), carried=[(5, 1, 2)])
    (received * 3).sum().backward()
    assert torch.equal(feature.grad, torch.full((5, 1, 2), 3.0))
    assert torch.equal(hidden.grad, torch.zeros(3, 2, 4))


def test_features_are_added_to_their_tokens_alone() -> None:
    hidden, features = torch.zeros(3, 2, 4), torch.arange(1.0, 4.0)[:, None, None].expand(3, 1, 4)
    places = torch.tensor([1, 3, 5])  # of the flattened [2 samples × 3 positions]
    sums = add_features(hidden, features, places, length=3, sequence_group=None)
    assert sums[..., 0].t().tolist() == [[0, 1, 0], [2, 0, 3]]


def test_a_blank_image_is_added_nowhere_but_has_a_gradient() -> None:
    hidden, feature = torch.ones(3, 1, 4), torch.ones(1, 1, 4, requires_grad=True)
    sums = add_features(hidden, feature, torch.empty(0, dtype=torch.long), length=3, sequence_group=None)
    assert torch.equal(sums, hidden)
    sums.sum().backward()
    assert torch.equal(feature.grad, torch.zeros(1, 1, 4))


@pytest.mark.parametrize(
    ("earlier", "count"),
    [
        ([], 0),
        (["vision.layers.0", "deepstack.0", "vision.layers.1"], 1),
        (["deepstack.0", "deepstack.1", "embedding"], 2),
        (["deepstack.0", "deepstack.1", "embedding", "language.layers.0"], 1),
        (["deepstack.0", "embedding", "language.layers.0", "language.layers.1"], 0),
    ],
)
def test_features_on_their_way(earlier: list[str], count: int) -> None:
    assert carried_features(earlier) == count
