"""Activations of the MLP that keep their input alone for the backward pass, and compute the rest anew.

Written as the products that autograd would record, SwiGLU keeps silu(gate) besides, GeGLU gelu(gate) and quick GELU
σ(1.702x): one more tensor of the widest width in a layer. torch's own GELUs keep their input anyway.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

Activation = Callable[[Tensor], Tensor]


def keeping_input(forward: Callable[[Tensor], Tensor], backward: Callable[[Tensor, Tensor], Tensor]) -> Activation:
    """Return an activation made of `forward(x)` and `backward(gradient of the output, x)`, one kernel each if fused."""

    def activation(x: Tensor) -> Tensor:
        output: Tensor = _KeepsInput.apply(x, forward, backward)
        return output

    return activation


class _KeepsInput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Any, backward: Any) -> Tensor:
        ctx.save_for_backward(x)
        ctx.gradient = backward
        return forward(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (x,) = ctx.saved_tensors
        return ctx.gradient(grad, x), None, None


class ActivationModule(MegatronModule):
    """An activation as megatron-core's layer specs build it: from 0.18 on they take modules alone."""

    def __init__(self, config: TransformerConfig, function: Activation) -> None:
        super().__init__(config)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def gelu(x: Tensor) -> Tensor:
    """x·Φ(x)."""
    return F.gelu(x)


def gelu_tanh(x: Tensor) -> Tensor:
    """Return the same with Φ approximated by a hyperbolic tangent."""
    return F.gelu(x, approximate="tanh")


def swiglu(x: Tensor) -> Tensor:
    """silu(gate)·up of [gate, up] (Shazeer 2020). megatron-core's own formula adds an offset of zero to `up`."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def swiglu_backward(grad: Tensor, x: Tensor) -> Tensor:
    """[grad·up·silu′(gate), grad·silu(gate)], written into one tensor."""
    gate, up = x.chunk(2, dim=-1)
    if torch.compiler.is_compiling():  # inductor joins without a copy, and fails at writing to parts of other lengths
        return torch.cat([torch.ops.aten.silu_backward(grad * up, gate), grad * F.silu(gate)], dim=-1)
    out = torch.empty_like(x)
    of_gate, of_up = out.chunk(2, dim=-1)
    torch.mul(grad, F.silu(gate), out=of_up)
    torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=of_gate)
    return out


def geglu(x: Tensor) -> Tensor:
    """gelu_tanh(gate)·up of [gate, up] (Shazeer 2020)."""
    gate, up = x.chunk(2, dim=-1)
    return gelu_tanh(gate).mul_(up)


def geglu_backward(grad: Tensor, x: Tensor) -> Tensor:
    """[grad·up·gelu_tanh′(gate), grad·gelu_tanh(gate)]."""
    gate, up = x.chunk(2, dim=-1)
    of_gate = torch.ops.aten.gelu_backward(grad * up, gate, approximate="tanh")
    return torch.cat([of_gate, grad * gelu_tanh(gate)], dim=-1)


def quick_gelu(x: Tensor) -> Tensor:
    """x·σ(1.702x), the approximation that CLIP was trained with."""
    return torch.sigmoid(1.702 * x).mul_(x)


def quick_gelu_backward(grad: Tensor, x: Tensor) -> Tensor:
    """With u = 1.702x: x·σ(u) = silu(u)/1.702, whose derivative is silu′(u)."""
    return torch.ops.aten.silu_backward(grad, 1.702 * x)


def activations(compiled: Callable[[Any], Any] = lambda function: function) -> dict[str, Activation]:
    """Return the activations by their names in the configuration; `compiled` makes one kernel of what is several."""
    return {
        "gelu": gelu,
        "gelu_tanh": gelu_tanh,
        "geglu": keeping_input(compiled(geglu), compiled(geglu_backward)),
        "quick_gelu": keeping_input(compiled(quick_gelu), compiled(quick_gelu_backward)),
        "swiglu": keeping_input(compiled(swiglu), compiled(swiglu_backward)),
    }


ACTIVATIONS = activations()
