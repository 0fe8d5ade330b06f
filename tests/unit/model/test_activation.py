"""Activations: the numbers of their formulas, and nothing kept for the backward pass but their input."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from megavlm.model.layer_modules import ACTIVATIONS

FORMULAS = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "geglu": lambda x: F.gelu(x.chunk(2, -1)[0], approximate="tanh") * x.chunk(2, -1)[1],
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


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_zeros_give_zeros_and_so_do_their_gradients_in_a_product(name: str) -> None:
    """Padding of an MLP stays zero: the second layer's columns get its outputs, zeros, as gradients, and are zeros
    themselves, so that no gradient comes back.
    """
    x = torch.zeros(2, 8, requires_grad=True)
    output = ACTIVATIONS[name](x)
    (gradient,) = torch.autograd.grad(output, x, torch.zeros_like(output))
    assert output.count_nonzero() == gradient.count_nonzero() == 0


COMPILED = """
import torch
from megavlm.model.layer_modules import ACTIVATIONS, activations
from megavlm.model.rotary import Rotary, rotation

def numbers(function, x, *rest):
    x = x.clone().requires_grad_()
    found = function(x, *rest)
    found = found if isinstance(found, tuple) else (found,)
    return *found, *torch.autograd.grad(found, x, [y.cos() for y in found])

compiled = activations(torch.compile)
for length in (5, 6, 9):  # a run compiles once for one length, and once for all others
    x, mixed, half = torch.randn(length, 2, 48), torch.randn(length, 2, 3, 48), torch.rand(length, 1, 1, 4)
    turns = rotation(torch.cat([half, half], -1), torch.float32)
    pairs = [(compiled[name], ACTIVATIONS[name], x) for name in ("swiglu", "quick_gelu")]
    pairs.append((Rotary(torch.compile).split_and_rotate, Rotary().split_and_rotate, mixed, [32, 8, 8], turns))
    for ours, theirs, *given in pairs:
        for one, other in zip(numbers(ours, *given), numbers(theirs, *given), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)
print(len(torch._dynamo.utils.compile_times(repr="csv")[0]))
"""


@pytest.mark.slow  # inductor starts a compiler
def test_compiled_numbers_are_the_same() -> None:
    """In a process of its own: tests disable compilation."""
    environment = os.environ | {"TORCH_COMPILE_DISABLE": "0"}
    ran = subprocess.run([sys.executable, "-c", COMPILED], env=environment, capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert int(ran.stdout) > 0, "nothing was compiled"
