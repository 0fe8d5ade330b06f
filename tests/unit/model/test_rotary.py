"""Splitting and rotation in one step: the numbers of doing it by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megavlm.model.rotary import Rotary, rotation

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
def test_numbers_are_those_of_splitting_and_turning(dtype, interleaved, repeats, rows, channels):
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
