"""FP8 without its hardware: operands are rounded to FP8 and back, the product is computed in bf16.

Inputs and weights are rounded to e4m3; gradients of outputs to e5m2 (hybrid) or e4m3, each tensor with a scale
(`scaling.py`). What remains between this and FP8 hardware is the rounding of x/s back to bf16, 2⁻⁹ relative where FP8's
own is 2⁻⁴ or 2⁻³. A user sees what FP8 does to his loss; it is slower than bf16 everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import count
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from torch import Tensor, nn

from megavlm.precision.scaling import AmaxHistory, Operands, Scaling, rounded


class _RoundOperand(torch.autograd.Function):
    """Rounds in the forward pass; the gradient of the rounded operand is taken as that of the operand."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scaling: Scaling, remember: bool) -> Tensor:
        return rounded(x, scaling, remember=remember)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad, None, None


class _RoundGradient(torch.autograd.Function):
    """Rounds the gradient in the backward pass, as FP8 products would read it; the forward pass is the identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scaling: Scaling) -> Tensor:
        ctx.scaling = scaling
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return rounded(grad, ctx.scaling, remember=True), None


class _EmulatesFp8:
    """Before megatron-core's parallel linears: all three products (output, input's and weight's gradient) in FP8.

    A bias is added after the product, so that its own gradient is not rounded, as in Transformer Engine. A pass runs a
    layer once, so delayed scaling may move its histories on at once: the new scales meet the next pass.
    """

    training: bool
    weight: Tensor

    def __init__(self, *args: Any, operands: Callable[[], Operands], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        with torch.device(self.weight.device):
            self.operands = operands()
        self.fp8_meta = self.operands.histories  # where Transformer Engine's modules have theirs

    def _forward_impl(
        self, input: Tensor, weight: Tensor, *args: Any, bias: Tensor | None = None, **kwargs: Any
    ) -> Tensor:
        by = self.operands
        operands = (_RoundOperand.apply(x, s, self.training) for x, s in ((input, by.input), (weight, by.weight)))
        product = super()._forward_impl(*operands, *args, bias=None, **kwargs)  # type: ignore[misc]
        product = _RoundGradient.apply(product, by.gradient)
        return product if bias is None else product + bias


class EmulatedColumnParallelLinear(_EmulatesFp8, ColumnParallelLinear):
    pass


class EmulatedRowParallelLinear(_EmulatesFp8, RowParallelLinear):
    pass


def same_when_repeated(run: Callable[[Tensor], Tensor], layer: nn.Module) -> Callable[[Tensor], Tensor]:
    """`run` of a layer for recomputation: all calls but the first read the first one's scales and remember nothing."""
    histories = list(_forward_histories(layer))
    before = [history.scale.clone() for history in histories]
    calls = count()

    def repeated(x: Tensor) -> Tensor:
        if next(calls) == 0:
            return run(x)
        with ExitStack() as stack:
            for history, scale in zip(histories, before, strict=True):
                stack.enter_context(history.as_of(scale))
            return run(x)

    return repeated


def _forward_histories(layer: nn.Module) -> Iterator[AmaxHistory]:
    for module in layer.modules():
        if isinstance(module, _EmulatesFp8) and module.fp8_meta:
            yield module.fp8_meta["scaling_fwd"]
