"""Emulated FP8 for devices without FP8 hardware: operands are rounded to FP8 and back, products computed in bf16.

Inputs and weights are rounded to e4m3; gradients of outputs to e5m2 (hybrid) or e4m3, each tensor with a scale.
The remaining difference from FP8 hardware is the rounding of x/s back to bf16, 2⁻⁹ relative, while the rounding to FP8
is 2⁻⁴ or 2⁻³. The emulation shows the effect of FP8 on the loss; it is slower than bf16 everywhere.

Each tensor is multiplied by a scale before it is rounded, so that its values fit into FP8's range. The scale is chosen
in one of two ways (Micikevicius et al. 2022, "FP8 formats for deep learning"): it maps to FP8's largest number the
tensor's largest present value (current scaling), or the largest value of past passes (delayed scaling), which avoids
reading the tensor twice. Values beyond the range are clamped to FP8's largest number.

Histories are updated immediately, tensor by tensor: a layer runs once per pass, so that the new scale is not needed
before the next pass, and no outer context has to track which layers ran.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from torch import Tensor, nn

FORWARD = torch.float8_e4m3fn
BACKWARD = {"hybrid": torch.float8_e5m2, "e4m3": torch.float8_e4m3fn}


@dataclass(frozen=True)
class CurrentScaling:
    """Current scaling of a tensor: the scale follows from the largest |x| on all ranks of a group, equal on each."""

    dtype: torch.dtype
    group: dist.ProcessGroup | None = None

    def scale(self, x: Tensor, *, remember: bool) -> Tensor:
        """Return the scale of x, fp32 []. `remember` is ignored; delayed scaling records x if it is set."""
        scale = torch.finfo(self.dtype).max / largest(x, self.group)
        return torch.where(torch.isfinite(scale), scale, 1.0)  # nothing but zeros, or so small that 1/x is no number


class AmaxHistory:
    """Largest absolute values (amax) of some tensors of one FP8 format in the last passes, and the tensors' scales.

    amax_history [length, tensors] and scale [tensors] have Transformer Engine's layout: row 0 is for the current pass,
    and zero between passes; rows 1 … length − 1 go from the oldest to the newest.
    """

    def __init__(self, tensors: int, dtype: torch.dtype, length: int, group: dist.ProcessGroup | None) -> None:
        """Start with zero histories of `length` rows and scales of one."""
        self.dtype = dtype
        self.group = group
        self.amax_history = torch.zeros(length, tensors)
        self.scale = torch.ones(tensors)
        self.closed = False

    def append(self, tensor: int, amax: Tensor) -> None:
        """Record `amax`, the largest |x| of tensor number `tensor` in this pass, and compute the next pass's scale."""
        rows = self.amax_history[:, tensor]
        rows[0] = amax
        wanted = rows.amax()
        scale = torch.finfo(self.dtype).max / wanted
        usable = (wanted > 0) & torch.isfinite(wanted)
        self.scale[tensor] = torch.where(usable, scale.clamp(max=torch.finfo(torch.float32).max), self.scale[tensor])
        rows.copy_(rows.roll(-1))
        rows[0] = 0

    @contextmanager
    def as_of(self, scale: Tensor) -> Iterator[None]:
        """Return a context that rounds tensors with earlier scales, `scale` [tensors], and records nothing."""
        latest, self.scale, self.closed = self.scale, scale, True
        try:
            yield
        finally:
            self.scale, self.closed = latest, False


@dataclass(frozen=True)
class DelayedScaling:
    """Delayed scaling of a tensor: a pass rounds x with the scale of earlier passes, then records the largest |x|."""

    history: AmaxHistory
    tensor: int

    @property
    def dtype(self) -> torch.dtype:
        return self.history.dtype

    def scale(self, x: Tensor, *, remember: bool) -> Tensor:
        history = self.history
        scale = history.scale[self.tensor].clone()
        if remember and not history.closed:
            history.append(self.tensor, largest(x, history.group))
        return scale


Scaling = CurrentScaling | DelayedScaling


@dataclass(frozen=True)
class Operands:
    """Scaling of a linear layer's FP8 operands: input, weight and gradient of the output."""

    input: Scaling
    weight: Scaling
    gradient: Scaling  # of the output
    histories: dict[str, AmaxHistory] = field(default_factory=dict)


def current_operands(format: str, group: dist.ProcessGroup | None) -> Operands:
    """Return the operands' current scaling, with amax over the tensor-parallel ranks in `group`."""
    forward = CurrentScaling(FORWARD, group)
    return Operands(input=forward, weight=forward, gradient=CurrentScaling(BACKWARD[format], group))


def delayed_operands(format: str, length: int, group: dist.ProcessGroup | None) -> Operands:
    """Return the operands' delayed scaling, with amax over `group`: the tensor- and data-parallel ranks of a layer.

    As in Transformer Engine's modules, histories also have columns for the layer's output and the input's gradient,
    which are never rounded here.
    """
    forward, backward = AmaxHistory(3, FORWARD, length, group), AmaxHistory(2, BACKWARD[format], length, group)
    return Operands(
        input=DelayedScaling(forward, 0),
        weight=DelayedScaling(forward, 1),
        gradient=DelayedScaling(backward, 0),
        histories={"scaling_fwd": forward, "scaling_bwd": backward},
    )


def largest(x: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Return max|x| over all ranks of `group`, in fp32; 0 if x is empty."""
    found = x.detach().abs().amax().float() if x.numel() else x.new_zeros((), dtype=torch.float32)
    if group is not None and group.size() > 1:
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=group)
    return found


def rounded(x: Tensor, scaling: Scaling, *, remember: bool = False) -> Tensor:
    """Round x to FP8 with the scale from `scaling`, and return it in the type of x."""
    limit = torch.finfo(scaling.dtype).max
    scale = scaling.scale(x, remember=remember)
    return ((x.float() * scale).clamp(-limit, limit).to(scaling.dtype).float() / scale).to(x.dtype)


class Round(torch.autograd.Function):
    """Rounds the value to FP8 in the forward pass if `forward` is given, and the gradient if `backward` is given."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Scaling | None, backward: Scaling | None, remember: bool) -> Tensor:
        ctx.scaling = backward
        return x.view_as(x) if forward is None else rounded(x, forward, remember=remember)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return grad if ctx.scaling is None else rounded(grad, ctx.scaling, remember=True), None, None, None


class _EmulatesFp8:
    """Mixin for megatron-core's parallel linear layers that emulates FP8 in the forward product and both gradients.

    A bias is added after the product, so that its gradient is not rounded, as in Transformer Engine. A pass runs a
    layer once, so delayed scaling can update its histories at once: the new scales are for the next pass.
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
        operands = (Round.apply(x, s, None, self.training) for x, s in ((input, by.input), (weight, by.weight)))
        product = super()._forward_impl(*operands, *args, bias=None, **kwargs)  # type: ignore[misc]
        product = Round.apply(product, None, by.gradient, True)
        return product if bias is None else product + bias


class EmulatedColumnParallelLinear(_EmulatesFp8, ColumnParallelLinear):
    pass


class EmulatedRowParallelLinear(_EmulatesFp8, RowParallelLinear):
    pass


def same_when_repeated(run: Callable[[Tensor], Tensor], layer: nn.Module) -> Callable[[Tensor], Tensor]:
    """Wrap `run` for recomputation: later calls use the scales of the first call and record nothing."""
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
