"""Allocation of a budget of image tokens to the regions of an image, in proportion to their relevance."""

from __future__ import annotations

import torch
from torch import Tensor


def allocate(relevance: Tensor, *, budget: int, fewest: int, most: int) -> Tensor:
    """Return the number of tokens of each region, int64 [..., R], for relevances [..., R] ≥ 0.

    Each is between `fewest` and `most`, and their sum is `budget`. They are in proportion to relevance where the bounds
    allow it.

    The total is always the budget, so that the length of a sequence does not depend on what an image shows. Shares are
    water-filled: sₖ = clamp(λ·rₖ, fewest, most) has a sum that grows with λ, which is found by bisection; what
    rounding down leaves goes to the largest remainders (Hamilton's method), lower numbers first where they are equal.
    Raises ValueError if the bounds do not admit the budget.
    """
    regions = relevance.shape[-1]
    if not regions * fewest <= budget <= regions * most:
        raise ValueError(f"{regions} regions of {fewest} to {most} tokens cannot have {budget}")
    weights = relevance.double().clamp_min(1e-9)  # double: every rank must round alike
    low, high = torch.zeros_like(weights[..., :1]), most / weights.amin(-1, keepdim=True)
    for _ in range(100):
        middle = (low + high) / 2
        enough = (middle * weights).clamp(fewest, most).sum(-1, keepdim=True) >= budget
        low, high = torch.where(enough, low, middle), torch.where(enough, middle, high)
    shares = (high * weights).clamp(fewest, most)
    counts = shares.floor()
    left = budget - counts.sum(-1, keepdim=True)
    # The remainders, largest first; a region that is full cannot have more.
    remainders = (shares - counts).masked_fill(counts >= most, -1.0)
    order = remainders.argsort(dim=-1, descending=True, stable=True)
    rank = torch.empty_like(order).scatter_(-1, order, torch.arange(regions).expand_as(order))
    return (counts + (rank < left)).long()
