"""Splitting and rotation in one step: the numbers of doing it by hand; which pair of channels turns with which axis."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megavlm.config.schema import LanguageConfig
from megavlm.model.rotary import Rotary, mrope_axes, rope, rotation

S, B, G, D = 7, 2, 3, 8


def by_hand(mixed: Tensor, angles: Tensor, repeats: int, *, interleaved: bool) -> tuple[Tensor, ...]:
    """Splitting by autograd, and Transformers' formula of the rotation."""
    query, key, value = mixed.split([repeats * D, D, D], dim=-1)
    turned, width = [], angles.shape[-1]
    for whole in (query.reshape(S, B, -1, D), key):
        x = whole[..., :width]
        first, second = (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
        partners = torch.stack((-second, first), -1).flatten(-2) if interleaved else torch.cat((-second, first), -1)
        rotated = x * angles.cos().to(x.dtype) + partners * angles.sin().to(x.dtype)
        turned.append(torch.cat((rotated, whole[..., width:]), -1))
    return *turned, value


@pytest.mark.parametrize("rows", [1, B])
@pytest.mark.parametrize("repeats", [1, 4])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("channels", [D, D // 2])
def test_numbers_are_those_of_splitting_and_turning(
    dtype: torch.dtype, interleaved: bool, repeats: int, rows: int, channels: int
) -> None:
    generator = torch.Generator().manual_seed(1)
    given = torch.randn(S, B, G, (repeats + 2) * D, generator=generator).to(dtype)
    half = torch.rand(S, rows, 1, channels // 2, generator=generator) * 9
    angles = half.repeat_interleave(2, dim=-1) if interleaved else torch.cat([half, half], -1)
    rotary, turns = Rotary(interleaved=interleaved), rotation(angles, dtype)
    found = []
    for split in (
        lambda mixed: rotary.split_and_rotate(mixed, [repeats * D, D, D], turns),
        lambda mixed: by_hand(mixed, angles, repeats, interleaved=interleaved),
    ):
        mixed = given.clone().requires_grad_()
        heads = split(mixed)
        gradients = [torch.randn(x.shape, generator=torch.Generator().manual_seed(2)).to(dtype) for x in heads]
        found.append((*heads, *torch.autograd.grad(heads, mixed, gradients)))
    tolerance = 1e-6 if dtype is torch.float32 else 2**-7  # two products and a sum, each rounded to 2^-9
    for ours, theirs in zip(*found, strict=True):
        assert ours.dtype == dtype
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


SECTION = st.tuples(st.integers(0, 8), st.integers(0, 8), st.integers(0, 8))


def test_sections_divide_the_pairs() -> None:
    assert mrope_axes((2, 1, 1), interleaved=False) == [0, 0, 1, 2]


def test_interleaved_axes_alternate_until_they_have_their_number() -> None:
    assert mrope_axes((3, 2, 1), interleaved=True) == [0, 1, 2, 0, 1, 0]
    assert Counter(mrope_axes((24, 20, 20), interleaved=True)) == {0: 24, 1: 20, 2: 20}


@given(SECTION, st.booleans())
def test_every_pair_has_an_axis(section: tuple[int, ...], interleaved: bool) -> None:
    axes = mrope_axes(section, interleaved=interleaved)
    assert len(axes) == sum(section)
    assert set(axes) <= {0, 1, 2}


@given(st.booleans())
def test_text_turns_as_without_mrope(interleaved: bool) -> None:
    """Where the three positions are equal, the axes make no difference."""
    plain = LanguageConfig(hidden_size=32, num_attention_heads=2, kv_channels=16)
    mrope = LanguageConfig(
        hidden_size=32, num_attention_heads=2, kv_channels=16, mrope_section=(3, 3, 2), mrope_interleaved=interleaved
    )
    positions = torch.tensor([[0, 1, 2, 3], [5, 6, 7, 8]])
    assert torch.equal(rope(positions.expand(3, 2, 4), mrope), rope(positions, plain))
