"""FP8 without its hardware: operands are rounded to FP8 and back, the product is computed in bf16.

Per-tensor current scaling (Micikevicius et al. 2022, "FP8 formats for deep learning"): a tensor x becomes
fp8(x·s)/s with s = largest FP8 number / max|x|, so that its largest value is the format's largest. Inputs and weights
are rounded to e4m3; gradients of outputs to e5m2 (hybrid) or e4m3. What remains between this and FP8 hardware is the
rounding of x/s back to bf16, 2⁻⁹ relative where FP8's own is 2⁻⁴ or 2⁻³.

max|x| is reduced over tensor-parallel ranks, so that every layout rounds alike. A user sees what FP8 does to his loss;
it is slower than bf16 everywhere.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from torch import Tensor

FORWARD = torch.float8_e4m3fn
BACKWARD = {"hybrid": torch.float8_e5m2, "e4m3": torch.float8_e4m3fn}


def rounded(x: Tensor, dtype: torch.dtype, group: dist.ProcessGroup | None = None) -> Tensor:
    """x rounded to the nearest multiples of FP8 numbers, in x's own type; max|x| is that of all ranks of `group`."""
    largest = x.detach().abs().amax().float() if x.numel() else x.new_zeros((), dtype=torch.float32)
    if group is not None and group.size() > 1:
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    limit = torch.finfo(dtype).max
    scale = torch.where(largest > 0, limit / largest, 1.0)
    scale = torch.where(torch.isfinite(scale), scale, 1.0)  # max|x| so small that its inverse is no number
    return ((x.float() * scale).clamp(-limit, limit).to(dtype).float() / scale).to(x.dtype)


class _RoundOperand(torch.autograd.Function):
    """Rounds forward; the gradient passes as if it had not (the rounded operand's is taken for the operand's)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        return rounded(x, FORWARD, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _RoundGradient(torch.autograd.Function):
    """Rounds backward alone: what lies below gets the gradient as FP8 products would read it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype, group: dist.ProcessGroup) -> Tensor:
        ctx.dtype, ctx.group = dtype, group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return rounded(grad, ctx.dtype, ctx.group), None, None


class _EmulatesFp8:
    """Before megatron-core's parallel linears: all three products (output, input's and weight's gradient) in FP8.

    A bias is added after the product, so that its own gradient is not rounded, as in Transformer Engine.
    """

    gradient_dtype: torch.dtype

    def _forward_impl(
        self, input: Tensor, weight: Tensor, *args: Any, bias: Tensor | None = None, **kwargs: Any
    ) -> Tensor:
        group = self.tp_group  # type: ignore[attr-defined]
        operands = (_RoundOperand.apply(x, group) for x in (input, weight))
        product = super()._forward_impl(*operands, *args, bias=None, **kwargs)  # type: ignore[misc]
        product = _RoundGradient.apply(product, self.gradient_dtype, group)
        return product if bias is None else product + bias


class HybridColumnParallelLinear(_EmulatesFp8, ColumnParallelLinear):
    gradient_dtype = BACKWARD["hybrid"]


class HybridRowParallelLinear(_EmulatesFp8, RowParallelLinear):
    gradient_dtype = BACKWARD["hybrid"]


class E4m3ColumnParallelLinear(_EmulatesFp8, ColumnParallelLinear):
    gradient_dtype = BACKWARD["e4m3"]


class E4m3RowParallelLinear(_EmulatesFp8, RowParallelLinear):
    gradient_dtype = BACKWARD["e4m3"]


COLUMN = {"hybrid": HybridColumnParallelLinear, "e4m3": E4m3ColumnParallelLinear}
ROW = {"hybrid": HybridRowParallelLinear, "e4m3": E4m3RowParallelLinear}
