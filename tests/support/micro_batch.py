"""A micro-batch that has everything one may have: pixels, several samples a row, features."""

from __future__ import annotations

import torch

from megavlm.inputs.batch import ImageBatch, ImageSizes, LocalFeatures, MicroBatch, TextBatch

PATCHES, PIXELS, TOKENS = 64, 48, 32


def micro_batch(number: int, *, dtype: torch.dtype = torch.float32) -> MicroBatch:
    tokens = torch.full((2, TOKENS), number)
    text = TextBatch(
        tokens=tokens,
        labels=tokens + 1,
        loss_mask=torch.ones(2, TOKENS),
        positions=torch.arange(TOKENS).expand(2, TOKENS),
        feature_positions=torch.arange(16),
        trained_positions=torch.arange(2 * TOKENS),
        cu_seqlens=torch.tensor([0, TOKENS, 2 * TOKENS], dtype=torch.int32),
    )
    sizes = ImageSizes(grids=((8, 8),))
    patches = torch.randn(PATCHES, PIXELS, generator=torch.Generator().manual_seed(number)).to(dtype)
    features = LocalFeatures(torch.arange(16), torch.zeros(1, requires_grad=True))
    return MicroBatch(text, sizes, ImageBatch(sizes, patches), features)
