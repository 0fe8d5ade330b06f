"""Does Transformer Engine compute here at all? Some kernels by themselves, against torch in fp32: seconds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.gpu.model import near, require_fp8

BF16 = torch.bfloat16
# E4M3 keeps 3 bits of a value: rounding is 2^-4 of it at most and 3.6 % in the mean square, of both factors 5 %.
FP8 = 0.1


def values(device: Any, *shape: int) -> Tensor:
    generator = torch.Generator(device).manual_seed(len(shape))
    return torch.randn(shape, generator=generator, device=device, dtype=BF16, requires_grad=True)


def test_a_norm_fused_with_a_product_is_both(world: Any, transformer_engine: Any) -> None:
    layer = transformer_engine.LayerNormLinear(512, 1024, normalization="RMSNorm", params_dtype=BF16)
    given = values(world.device, 256, 512)
    found = layer(given)
    normed = torch.nn.functional.rms_norm(given.float(), (512,), layer.layer_norm_weight.float(), layer.eps)
    assert near(found, torch.nn.functional.linear(normed, layer.weight.float(), layer.bias.float()))
    found.float().square().mean().backward()
    assert given.grad is not None
    assert layer.weight.grad.isfinite().all()


@pytest.mark.parametrize("recipe", ["Float8CurrentScaling", "DelayedScaling", "Float8BlockScaling"])
def test_a_product_in_fp8_is_near_the_exact_one(recipe: str, world: Any, transformer_engine: Any) -> None:
    """The second call: delayed scaling has seen the values by then."""
    from transformer_engine.common import recipe as recipes

    require_fp8(world)
    layer = transformer_engine.Linear(512, 1024, bias=False, params_dtype=BF16)
    given = values(world.device, 256, 512)
    for _ in range(2):
        with transformer_engine.fp8_autocast(enabled=True, fp8_recipe=getattr(recipes, recipe)()):
            found = layer(given)
        found.float().square().mean().backward()
    expected = torch.nn.functional.linear(given.float(), layer.weight.float())
    off = float((found.float() - expected).norm() / expected.norm())
    assert 0.01 < off < FP8
    assert layer.weight.grad.isfinite().all()


def test_fused_adam_is_adam(world: Any, transformer_engine: Any) -> None:
    start, gradient = (values(world.device, 1000).detach().float() for _ in range(2))
    ours, theirs = (torch.nn.Parameter(start.clone()) for _ in range(2))
    fused = transformer_engine.optimizers.FusedAdam([ours], lr=1e-3, weight_decay=0.01)
    plain = torch.optim.AdamW([theirs], lr=1e-3, weight_decay=0.01)
    for optimizer, param in ((fused, ours), (plain, theirs)):
        param.grad = gradient.clone()
        optimizer.step()
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)
    assert not torch.equal(ours, start)
