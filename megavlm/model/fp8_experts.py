"""Grouped products in emulated FP8: rows, weights and output gradients of each expert are rounded by their own scales.

So Transformer Engine's grouped products do it, whose kernels see one expert at a time. Scales are current ones: the
history of an expert would have to travel with it from rank to rank. Experts without rows have none.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megavlm.model.experts import Product, Rows, grouped
from megavlm.precision.scaling import Operands, Scaling, rounded


class _RoundEach(torch.autograd.Function):
    """Rounds each part of x along its first dimension; the gradient of the rounded x is taken as that of x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sizes: list[int], scaling: Scaling) -> Tensor:
        return _rounded(x, sizes, scaling)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad, None, None


class _RoundEachGradient(torch.autograd.Function):
    """Rounds each part of the gradient in the backward pass; the forward pass is the identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sizes: list[int], scaling: Scaling) -> Tensor:
        ctx.sizes, ctx.scaling = sizes, scaling
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _rounded(grad, ctx.sizes, ctx.scaling), None, None


def _rounded(x: Tensor, sizes: list[int], scaling: Scaling) -> Tensor:
    return torch.cat([rounded(part, scaling) for part in x.split(sizes)])


def emulated(by: Operands) -> Product:
    """Return the product in FP8 with these current scalings."""

    def product(x: Tensor, weight: Tensor, rows: Rows) -> Tensor:
        sizes = rows.counts.tolist()
        inputs, weights = _RoundEach.apply(x, sizes, by.input), _RoundEach.apply(weight, [1] * len(weight), by.weight)
        output: Tensor = _RoundEachGradient.apply(grouped(inputs, weights, rows), sizes, by.gradient)
        return output

    return product
