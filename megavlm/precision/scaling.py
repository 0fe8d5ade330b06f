"""Scales of FP8 tensors: what a tensor is multiplied with, before it is rounded, so that FP8's range holds it.

One scale per tensor, chosen in one of two ways (Micikevicius et al. 2022, "FP8 formats for deep learning"): so that
the largest of its present values becomes FP8's largest number (current scaling), or so that the largest of past passes
does (delayed scaling), which spares reading the tensor twice. A value beyond the range becomes FP8's largest number.

Histories advance tensor by tensor and immediately: a layer runs once per pass, so that the new scale is not needed
before the next pass, and no context around layers must know which of them ran.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

FORWARD = torch.float8_e4m3fn
BACKWARD = {"hybrid": torch.float8_e5m2, "e4m3": torch.float8_e4m3fn}


class Scaling(Protocol):
    """The scale of one tensor of a layer, pass after pass."""

    @property
    def dtype(self) -> torch.dtype:
        """Return the FP8 format."""

    def scale(self, x: Tensor, *, remember: bool) -> Tensor:
        """Return the scale of x, fp32 []. `remember`: x counts for later scales if these depend on a history."""


@dataclass(frozen=True)
class CurrentScaling:
    """Scales by the current values of x on all ranks of a group, so that they round alike."""

    dtype: torch.dtype
    group: dist.ProcessGroup | None = None

    def scale(self, x: Tensor, *, remember: bool) -> Tensor:
        scale = torch.finfo(self.dtype).max / largest(x, self.group)
        return torch.where(torch.isfinite(scale), scale, 1.0)  # nothing but zeros, or so small that 1/x is no number


@dataclass(frozen=True)
class DelayedRecipe:
    """How scales follow from histories of largest values (Transformer Engine's `DelayedScaling`)."""

    length: int  # passes that are remembered
    algorithm: str = "max"  # or "most_recent"
    margin: int = 0  # powers of two that stay free


class AmaxHistory:
    """The largest values of the last passes of some tensors that have one format, and their scales.

    amax_history [length, tensors] and scale [tensors] are laid out as Transformer Engine does: row 0 is for the pass
    under way, and zero between passes; rows 1 … length − 1 go from the oldest to the newest.
    """

    def __init__(
        self, tensors: int, dtype: torch.dtype, recipe: DelayedRecipe, group: dist.ProcessGroup | None
    ) -> None:
        self.dtype = dtype
        self.recipe = recipe
        self.group = group
        self.amax_history = torch.zeros(recipe.length, tensors)
        self.scale = torch.ones(tensors)
        self.closed = False

    def append(self, tensor: int, amax: Tensor) -> None:
        """Record `amax`, the largest value of `tensor` in this pass, and compute the scale of the next pass."""
        rows = self.amax_history[:, tensor]
        rows[0] = amax
        wanted = rows.amax() if self.recipe.algorithm == "max" else rows[0]
        scale = torch.finfo(self.dtype).max / wanted / 2**self.recipe.margin
        usable = (wanted > 0) & torch.isfinite(wanted)
        self.scale[tensor] = torch.where(usable, scale.clamp(max=torch.finfo(torch.float32).max), self.scale[tensor])
        rows.copy_(rows.roll(-1))
        rows[0] = 0

    @contextmanager
    def as_of(self, scale: Tensor) -> Iterator[None]:
        """Return a context in which tensors are rounded by these earlier scales [tensors] and nothing is recorded."""
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


@dataclass(frozen=True)
class Operands:
    """The scales of the tensors that a linear layer's FP8 products read, by direction."""

    input: Scaling
    weight: Scaling
    gradient: Scaling  # of the output
    histories: dict[str, AmaxHistory] = field(default_factory=dict)


def current_operands(format: str, group: dist.ProcessGroup | None) -> Operands:
    """Return current scaling over the ranks of `group`, the tensor-parallel ones."""
    forward = CurrentScaling(FORWARD, group)
    return Operands(input=forward, weight=forward, gradient=CurrentScaling(BACKWARD[format], group))


def delayed_operands(format: str, recipe: DelayedRecipe, group: dist.ProcessGroup | None) -> Operands:
    """Delayed scaling over the ranks of `group`: tensor- and data-parallel ones, all that run a layer at a time.

    Like Transformer Engine's modules they have places for the layer's output and its input's gradient, which are never
    rounded here.
    """
    forward, backward = AmaxHistory(3, FORWARD, recipe, group), AmaxHistory(2, BACKWARD[format], recipe, group)
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
    """Return x rounded to FP8 at this scale, in the type of x."""
    limit = torch.finfo(scaling.dtype).max
    scale = scaling.scale(x, remember=remember)
    return ((x.float() * scale).clamp(-limit, limit).to(scaling.dtype).float() / scale).to(x.dtype)
