"""Delayed weight gradients: a backward pass computes the gradients of inputs, and those of weights follow later.

The backward pass of a linear layer y = x·Wᵀ has two products. The previous pipeline stage waits for gradₓ = g·W. The
other, grad_W = gᵀ·x, is needed only at the end of the step, and can fill a bubble of the pipeline ("Zero Bubble
Pipeline Parallelism", Qi et al. 2023). Until then x and g are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import get_gradient_edge

Compute = Callable[[], Sequence[Tensor]]  # the gradients of a layer's weights
Product = Callable[[Tensor, Tensor], Tensor]  # of x and a weight
Weights = tuple[Tensor, ...]  # of one layer: its weight, and its bias where one product makes both gradients


class WeightGradients:
    """The weight gradients that backward passes of a rank's chunks have delayed."""

    def __init__(self) -> None:
        self._left: dict[tuple[int, int], list[tuple[Weights, Compute]]] = {}  # by chunk and micro-batch
        self._now: list[tuple[Weights, Compute]] | None = None  # those of the running backward pass

    @contextmanager
    def left_by(self, chunk: int, micro_batch: int) -> Iterator[None]:
        """Let the backward pass in this context delay its weight gradients until `compute` is called."""
        self._now = self._left[chunk, micro_batch] = []
        try:
            yield
        finally:
            self._now = None

    def leave(self, weights: Weights, compute: Compute) -> None:
        """Store the function that computes a layer's weight gradients; outside `left_by`, call it at once."""
        if self._now is None:
            _accumulate(weights, compute)
        else:
            self._now.append((weights, compute))

    def compute(self, chunk: int, micro_batch: int) -> None:
        """Compute the weight gradients that a backward pass delayed, in its order, and free their inputs."""
        left = self._left.pop((chunk, micro_batch))[::-1]
        while left:
            _accumulate(*left.pop())

    def clear(self) -> None:
        """Discard the delayed gradients of a step that did not finish."""
        self._left.clear()


def _accumulate(weights: Weights, compute: Compute) -> None:
    """Add gradients to those of their weights through autograd.

    Hooks then see them as in any other backward pass: those of data parallelism add them to `main_grad`, and reduce a
    bucket whose gradients are complete.
    """
    with torch.no_grad():
        gradients = compute()
    torch.autograd.backward(weights, gradients)


@dataclass(frozen=True)
class LaterGradient:
    """A weight whose gradient is delayed. It is no tensor, so autograd has no path to the weight."""

    weight: Tensor
    gradients: WeightGradients

    def leave(self, compute: Callable[[], Tensor]) -> None:
        """Delay the gradient of the weight, which `compute` returns."""
        self.gradients.leave((self.weight,), lambda: (compute(),))


class _Linear(torch.autograd.Function):
    """y = x·Wᵀ + b as in megatron-core's parallel linear layers, without a path to W, whose gradient is delayed.

    x is sharded along the sequence over the ranks of `gathered`, if there is such a group; else its gradient is summed
    over the ranks of `summed`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        bias: Tensor | None,
        later: LaterGradient,
        gathered: dist.ProcessGroup | None,
        summed: dist.ProcessGroup | None,
    ) -> Tensor:
        ctx.save_for_backward(x)
        ctx.later, ctx.gathered, ctx.summed, ctx.biased = later, gathered, summed, bias is not None
        output = torch.matmul(_whole(x, gathered), later.weight.t())
        return output if bias is None else output + bias

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        group = ctx.gathered
        of_x = gradient.matmul(ctx.later.weight)
        if group is not None:
            whole, of_x = of_x.contiguous(), torch.empty_like(x)
            dist.reduce_scatter_tensor(of_x, whole, group=group)
        elif ctx.summed is not None:
            dist.all_reduce(of_x, group=ctx.summed)
        rows = gradient.contiguous().flatten(0, -2)
        ctx.later.leave(lambda: rows.t().matmul(_whole(x, group).contiguous().flatten(0, -2)))
        return of_x, rows.sum(dim=0) if ctx.biased else None, None, None, None


def _whole(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Return all positions [S, B, H] of x, which is sharded over the ranks of a group."""
    if group is None:
        return x
    whole = x.new_empty(group.size() * x.shape[0], *x.shape[1:])
    dist.all_gather_into_tensor(whole, x.contiguous(), group=group)
    return whole


def has_halves(x: Tensor, weight: Tensor) -> bool:
    """Return whether a backward pass computes gradients of both an input and a weight."""
    return torch.is_grad_enabled() and x.requires_grad and weight.requires_grad


class _LeavesGradient:
    """Base class in front of megatron-core's parallel linear layers."""

    weight_gradients: WeightGradients

    def _forward_impl(self, input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not has_halves(input, weight) or kwargs["gradient_accumulation_fusion"]:
            return super()._forward_impl(input, weight, *args, **kwargs)  # type: ignore[misc]
        group = kwargs["tp_group"]
        gathered = group if kwargs["sequence_parallel"] else None
        summed = group if kwargs["allreduce_dgrad"] else None
        later = LaterGradient(weight, self.weight_gradients)
        return _Linear.apply(input, kwargs["bias"], later, gathered, summed)


class _Product(torch.autograd.Function):
    """Any differentiable product of x and a weight, with the weight's gradient delayed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, later: LaterGradient, product: Product) -> Tensor:
        ctx.x, ctx.weight = x.detach().requires_grad_(), later.weight.detach().requires_grad_()
        with torch.enable_grad():
            output = product(ctx.x, ctx.weight)
        ctx.later, ctx.edge = later, get_gradient_edge(output)  # an edge keeps no memory, unlike the output
        return output.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        edge, weight = ctx.edge, ctx.weight
        (of_x,) = torch.autograd.grad((edge,), ctx.x, gradient, retain_graph=True)
        ctx.later.leave(lambda: torch.autograd.grad((edge,), weight, gradient)[0])
        return of_x, None, None


def product_leaving_gradient(product: Product, x: Tensor, weight: Tensor, gradients: WeightGradients | None) -> Tensor:
    """Return `product(x, weight)`; the weight's gradient is delayed by `gradients`, unless that is None."""
    if gradients is None or not has_halves(x, weight):
        return product(x, weight)
    return _Product.apply(x, LaterGradient(weight, gradients), product)


class _Store:
    """Replacement of Transformer Engine's `WeightGradStore` that takes the delayed products of a layer.

    The original is a queue for each layer. Its `backward_dw` sets `grad` and runs hooks that DDP would have to
    register, and it keeps the bias gradient of one micro-batch alone.
    """

    def __init__(self, weights: Weights, gradients: WeightGradients) -> None:
        self._weights, self._gradients = weights, gradients

    def delay_wgrad_compute(self) -> bool:
        """Return True, so that Transformer Engine's layer calls `put`."""
        return True

    def put(self, inputs: Sequence[Tensor], product: Callable[..., Sequence[Tensor]]) -> None:
        """Delay a product that returns the gradient of the weight, then that of the bias or None."""
        count = len(self._weights)
        self._gradients.leave(self._weights, lambda: tuple(product(*inputs))[:count])


class LeavesToStore:
    """Base class in front of Transformer Engine's `Linear` and `LayerNormLinear`.

    A forward pass uses copies of weight and bias that share their memory. So its backward pass gives the parameters no
    gradient, and DDP's hooks on them run when the delayed gradients are computed.
    """

    weight_gradients: WeightGradients

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        module: Any = self
        if not (torch.is_grad_enabled() and module.weight.requires_grad):
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        adds_bias = module.apply_bias and not module.gemm_bias_unfused_add  # within the product
        names = ("weight", "bias") if adds_bias else ("weight",)
        parameters, store = {name: getattr(module, name) for name in names}, module.wgrad_store
        module.wgrad_store = _Store(tuple(parameters.values()), self.weight_gradients)
        for name, parameter in parameters.items():
            setattr(module, name, nn.Parameter(parameter.detach()))
        try:
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        finally:
            module.wgrad_store = store
            for name, parameter in parameters.items():
                setattr(module, name, parameter)


def leave_weight_gradients(chunk: nn.Module, gradients: WeightGradients) -> None:
    """Let the linear layers of a chunk delay their weight gradients by `gradients`.

    These are linear layers of megatron-core and, without FP8, of Transformer Engine, and modules with an attribute
    `weight_gradients`. Other weights get their gradients in the backward pass.
    """
    module: Any
    for module in chunk.modules():
        linear: Any = type(module)
        if getattr(linear, "_forward_impl", None) in _FORWARDS:
            module.__class__ = _leaving(linear, _LeavesGradient)
        elif hasattr(module, "wgrad_store") and hasattr(module, "weight") and not module.config.fp8:
            module.__class__ = _leaving(linear, LeavesToStore)
        if hasattr(module, "weight_gradients") or isinstance(module, (_LeavesGradient, LeavesToStore)):
            module.weight_gradients = gradients


_FORWARDS = (ColumnParallelLinear._forward_impl, RowParallelLinear._forward_impl)  # not those that emulate FP8


@cache
def _leaving(linear: Any, way: type) -> type:
    return type(linear.__name__, (way, linear), {"__module__": linear.__module__})
