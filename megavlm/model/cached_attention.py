"""Attention of new tokens to all tokens that a key/value cache holds.

Queries of one token are few and their keys many: what takes the time is to read the cache, and torch's
`scaled_dot_product_attention` with a mask does that once. Legend: B rows, S new positions, L positions of the cache,
N query heads, G key/value heads, D head width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from megavlm.data.kv_cache import Continuation


@dataclass(frozen=True, eq=False)
class CachedAttention:
    """The rows of a pass, and which of the cache's positions each of their new ones attends to."""

    rows: Continuation
    places: Tensor  # [B, S] int64: where the new positions lie in the cache
    mask: Tensor  # [B, 1, S, L] bool

    def attend(self, layer: object, query: Tensor, key: Tensor, value: Tensor, *, scale: float | None) -> Tensor:
        """Add to the cache and attend: query [S, B, N, D], key and value [S, B, G, D] → [S, B, N·D]."""
        kept = self.rows.cache.add(layer, self.places, key.transpose(0, 1), value.transpose(0, 1))
        repeats = query.shape[2] // key.shape[2]  # torch's kernels that take masks know no groups
        keys, values = (x.repeat_interleave(repeats, dim=2).transpose(1, 2) for x in kept)
        out = F.scaled_dot_product_attention(query.permute(1, 2, 0, 3), keys, values, attn_mask=self.mask, scale=scale)
        return out.permute(2, 0, 1, 3).flatten(2)


def cached_attention(
    rows: Continuation, positions: int, *, window: int | None = None, runs: Tensor | None = None
) -> CachedAttention:
    """Return how S = `positions` new tokens of each row attend: to those before them and to themselves.

    Args:
        window: how many of the last tokens a token attends to; None: all.
        runs: [B, S] int64, by `masks.image_runs`: tokens of one run attend to each other both ways. An image lies in
            one pass, the first.
    """
    places = rows.starts[:, None] + torch.arange(positions, device=rows.starts.device)
    keys = torch.arange(rows.cache.length, device=places.device)
    allowed = keys <= places[..., None]
    if runs is not None:
        together = (runs[:, :, None] == runs[:, None, :]) & (runs[:, :, None] > 0)
        allowed[..., :positions] |= together & (rows.starts == 0)[:, None, None]
    if window is not None:
        allowed &= keys > places[..., None] - window
    return CachedAttention(rows, places, allowed[:, None])
