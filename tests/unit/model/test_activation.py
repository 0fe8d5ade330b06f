"""Activations: the numbers of their formulas, and nothing kept for the backward pass but their input."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from megavlm.model.activation import ACTIVATIONS

FORMULAS = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "swiglu": lambda x: F.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1],
}


def results(activation, x: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:  # type: ignore[no-untyped-def]
    """The output, the gradient of the input for a fixed gradient, and what was kept."""
    kept: list[Tensor] = []
    x = x.clone().requires_grad_()
    with saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        output = activation(x)
    (gradient,) = torch.autograd.grad(output, x, torch.linspace(-1, 1, output.numel()).view_as(output).to(x.dtype))
    return output, gradient, kept


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FORMULAS)
def test_numbers_are_the_formulas_and_only_the_input_is_kept(name: str, dtype: torch.dtype) -> None:
    x = torch.randn(5, 3, 16, generator=torch.Generator().manual_seed(1)).mul_(3).to(dtype)
    output, gradient, kept = results(ACTIVATIONS[name], x)
    assert sum(tensor.numel() for tensor in kept) == x.numel()
    # bf16: both round each step to 2^-9 of it; a gradient has some five steps.
    tolerance = 1e-6 if dtype is torch.float32 else 5 * 2**-9
    for found, expected in zip((output, gradient), results(FORMULAS[name], x)[:2], strict=True):
        assert found.dtype == dtype
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
