"""The example `examples/arr_coc`: its channels, how it shares a budget of tokens, and what its tokens are made of."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support import extensions

extensions.install()

from arr_coc.allocation import allocate  # noqa: E402
from arr_coc.module import members, regions  # noqa: E402
from arr_coc.texture import CHANNELS, MEAN, STD, sobel, texture, to_lab  # noqa: E402


# CIE Lab of sRGB colours under D65, as tables of colour science have them.
@pytest.mark.parametrize(
    ("colour", "lab"),
    [
        ((255, 255, 255), (100.0, 0.0, 0.0)),
        ((0, 0, 0), (0.0, 0.0, 0.0)),
        ((255, 0, 0), (53.24, 80.09, 67.20)),
        ((0, 255, 0), (87.73, -86.18, 83.18)),
        ((0, 0, 255), (32.30, 79.19, -107.86)),
        ((128, 128, 128), (53.59, 0.0, 0.0)),
    ],
)
def test_lab_is_that_of_colour_science(colour: tuple[int, ...], lab: tuple[float, ...]) -> None:
    np.testing.assert_allclose(to_lab(np.array(colour, np.float64)[None, None] / 255)[0, 0], lab, atol=0.02)


def test_a_slope_has_edges_of_its_size() -> None:
    across, down = sobel(np.arange(8.0)[None, :] * 0.1 + np.zeros((6, 1)))
    np.testing.assert_allclose(across[:, 1:-1], 0.1)
    np.testing.assert_allclose(down, 0, atol=1e-12)


def test_there_are_thirteen_channels_and_the_first_three_are_the_photo() -> None:
    photo = np.random.default_rng(0).integers(0, 256, (12, 20, 3)).astype(np.uint8)
    made = texture(photo)
    assert (made.shape, made.dtype) == ((12, 20, len(CHANNELS)), np.float32)
    assert len(CHANNELS) == len(MEAN) == len(STD) == 13
    np.testing.assert_allclose(made[..., :3], photo / 255, rtol=1e-6)
    rows, columns = made[..., CHANNELS.index("row")], made[..., CHANNELS.index("column")]
    np.testing.assert_allclose(made[..., CHANNELS.index("eccentricity")], np.hypot(rows, columns), rtol=1e-6)
    assert rows[0, 0] == -rows[-1, 0] < 0


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_the_budget_is_spent_within_the_bounds_in_the_order_of_relevance(data: st.DataObject) -> None:
    count, fewest = data.draw(st.integers(1, 12)), data.draw(st.integers(0, 70))
    most = fewest + data.draw(st.integers(0, 340))
    budget = data.draw(st.integers(count * fewest, count * most))
    relevance = torch.tensor(data.draw(st.lists(st.floats(0, 1e3, width=32), min_size=count, max_size=count)))
    tokens = allocate(relevance, budget=budget, fewest=fewest, most=most)
    assert tokens.sum() == budget
    assert fewest <= tokens.min()
    assert tokens.max() <= most
    order = relevance.argsort(stable=True)
    for less, more in zip(order[:-1].tolist(), order[1:].tolist(), strict=True):
        if relevance[more] > relevance[less]:
            assert tokens[more] >= tokens[less] - 1, "whole numbers may differ by one"


def test_shares_follow_relevance_between_the_bounds() -> None:
    tokens = allocate(torch.tensor([1.0, 2.0, 4.0, 100.0]), budget=1000, fewest=64, most=400)
    assert tokens.tolist() == [86, 171, 343, 400]
    with pytest.raises(ValueError, match="2 regions of 64 to 400 tokens cannot have 100"):
        allocate(torch.ones(2), budget=100, fewest=64, most=400)


def test_tokens_divide_their_regions_patches_as_adaptive_pooling_does() -> None:
    grid, side = (5, 7), 2
    sizes = torch.bincount(regions(grid, side, device=torch.device("cpu")))
    assert sizes.sum() == 35
    tokens = torch.tensor([3, 14, 1, 6])
    made = members(sizes, tokens)
    values = torch.randn(35)
    expected = [
        torch.nn.functional.adaptive_avg_pool1d(part[None], count)[0]
        for part, count in zip(values.split(sizes.tolist()), tokens.tolist(), strict=True)
    ]
    torch.testing.assert_close(made @ values / made.sum(1), torch.cat(expected))
