"""Muon: momentum of matrices, made orthogonal (Jordan et al. 2024; at scale: Liu et al. 2025).

    M ← μM + G          U = G + μM  (Nesterov)          W ← (1 − ηλ) W − η · 0.2·√max(rows, columns) · orthogonal(U)

The factor gives an update the root mean square of AdamW's, so that learning rates and weight decay may be kept.

The nearest orthogonal matrix, nearly: with X = U S Vᵀ, X ← aX + b(XXᵀ)X + c(XXᵀ)²X turns each singular value s into
as + bs³ + cs⁵. The coefficients let small ones grow fast, and leave those above about 0.01 of the norm between 0.7 and
1.2 after five steps (Newton-Schulz iterations): UVᵀ but for that spread, which training does not notice.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from megavlm.config import update_rules
from megavlm.config.schema import OptimizerConfig
from megavlm.model.specs import DTYPES

MATCHES_ADAMW = 0.2  # root mean square of AdamW's updates (Liu et al. 2025)
_A, _B, _C = 3.4445, -4.7750, 2.0315
_EPSILON = 1e-7  # added to the norm: zeros stay zeros


@dataclass(frozen=True)
class Muon:
    """Updates matrices as a `MatrixRule`: `steps` Newton-Schulz iterations, computed in `dtype`."""

    momentum: float
    steps: int
    dtype: torch.dtype

    @classmethod
    def of(cls, options: OptimizerConfig) -> Self:
        """Return the rule of a run."""
        return cls(options.muon_momentum, options.muon_num_ns_steps, DTYPES[options.muon_precision])

    @property
    def state(self) -> tuple[str, ...]:
        return update_rules.MUON.state

    def accumulate(self, gradient: Tensor, state: Mapping[str, Tensor]) -> None:
        """Update the momentum with a part of a gradient, which becomes that part of U."""
        momentum = state["momentum"]
        momentum.mul_(self.momentum).add_(gradient)
        gradient.add_(momentum, alpha=self.momentum)

    def update_of(self, matrices: Tensor) -> Tensor:
        """Return the updates, but for the learning rate, of matrices U [B, rows, columns]."""
        return orthogonalized(matrices, steps=self.steps).mul_(MATCHES_ADAMW * math.sqrt(max(matrices.shape[1:])))


def orthogonalized(matrices: Tensor, *, steps: int) -> Tensor:
    """Return matrices [B, rows, columns] with singular values near 1, in the type that they have.

    Rows and columns of zeros stay zeros, and change nothing else.
    """
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices  # products of the shorter side are cheaper
    norm = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True, dtype=torch.promote_types(x.dtype, torch.float32))
    x = (x / (norm + _EPSILON)).to(x.dtype)
    for _ in range(steps):
        square = torch.bmm(x, x.mT)
        polynomial = torch.baddbmm(square, square, square, beta=_B, alpha=_C)
        x = torch.baddbmm(x, polynomial, x, beta=_A)
    return x.mT if tall else x
