"""A micro-batch that has everything one may have: pixels, several samples a row, features."""

from __future__ import annotations

import torch

from megavlm.data.batch import MicroBatch

PATCHES, PIXELS, TOKENS = 64, 48, 32


def micro_batch(number: int, *, dtype: torch.dtype = torch.float32) -> MicroBatch:
    tokens = torch.full((2, TOKENS), number)
    return MicroBatch(
        tokens=tokens,
        labels=tokens + 1,
        loss_mask=torch.ones(2, TOKENS),
        positions=torch.arange(TOKENS).expand(2, TOKENS),
        grids=((8, 8),),
        feature_positions=torch.arange(16),
        patches=torch.randn(PATCHES, PIXELS, generator=torch.Generator().manual_seed(number)).to(dtype),
        cu_seqlens=torch.tensor([0, TOKENS, 2 * TOKENS], dtype=torch.int32),
        features=torch.zeros(1, requires_grad=True),
    )
