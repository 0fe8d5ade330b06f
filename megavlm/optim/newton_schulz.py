"""The nearest orthogonal matrix, nearly: Newton-Schulz iterations of Muon (Jordan et al. 2024).

With X = U S Vᵀ, X ← aX + b(XXᵀ)X + c(XXᵀ)²X turns each singular value s into as + bs³ + cs⁵. The coefficients let
small ones grow fast, and leave those above about 0.01 of the norm between 0.7 and 1.2 after five steps: UVᵀ but for
that spread, which training does not notice.
"""

from __future__ import annotations

import torch
from torch import Tensor

_A, _B, _C = 3.4445, -4.7750, 2.0315
_EPSILON = 1e-7  # added to the norm: zeros stay zeros


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
