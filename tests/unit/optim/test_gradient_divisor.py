"""Dividing by tokens and clipping as part of the update, against the same in passes of their own."""

from __future__ import annotations

import pytest
import torch

from megavlm.backend import activate

activate()  # before the modules below import megatron-core

from megavlm.optim.chained import divisor_of  # noqa: E402
from megavlm.optim.elementwise import ElementwiseOptimizer  # noqa: E402
from megavlm.optim.rules import ELEMENTWISE  # noqa: E402
from megavlm.optim.stores import HostStore, StateStore  # noqa: E402


def params(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in ((37, 5), (64,), (3, 3, 3))]


@pytest.mark.parametrize("name", ELEMENTWISE)
@pytest.mark.parametrize("store", [StateStore, HostStore])
@pytest.mark.parametrize("clip", [0.0, 0.3, 1e6])
@pytest.mark.parametrize("tokens", [0, 1, 12345, 2**25 + 1])
def test_one_division_is_two_passes(name: str, store: type[StateStore], clip: float, tokens: int) -> None:
    ours, theirs = params(1), params(1)
    inner = ElementwiseOptimizer(ours, ELEMENTWISE[name], store(), lr=1e-2)
    plain = ElementwiseOptimizer(theirs, ELEMENTWISE[name], lr=1e-2)
    for step in range(3):
        sums = [each * max(tokens, 1) for each in params(2 + step)]
        for p, g in zip(ours, sums, strict=True):
            p.grad = g.clone()
        means = [g / max(tokens, 1) for g in sums]
        norm = float(torch.linalg.vector_norm(torch.stack([g.norm() for g in means])))
        scale = min(1.0, clip / (norm + 1e-6)) if clip else 1.0
        assert clip != 0.3 or scale < 1, "this one clips"
        for p, g in zip(theirs, means, strict=True):
            p.grad = g * scale
        whole = float(torch.linalg.vector_norm(torch.stack([g.norm() for g in sums])))
        inner.divisor = divisor_of(whole, tokens, clip=clip or float("inf"))
        inner.step()
        plain.step()
        for mine, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-7)
