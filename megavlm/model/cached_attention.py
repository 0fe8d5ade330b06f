"""Attention of new tokens to all tokens that a key/value cache holds.

Queries of one token are few and their keys many: what takes the time is to read the cache, and torch's
`scaled_dot_product_attention` with a mask does that once. A long prompt attends span by span, each with a mask of its
own: one mask of all would take as many bytes as the prompt has tokens squared. Legend: B rows, S new positions, L
positions of the cache, N query heads, G key/value heads, D head width.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from megavlm.arch.masks import QUERIES
from megavlm.inputs.batch import Continuation


@dataclass(frozen=True, eq=False)
class CachedAttention:
    """How S new tokens of each row of a pass attend: to those before them and to themselves."""

    rows: Continuation
    positions: int  # S
    window: int | None = None  # how many of the last tokens a token attends to; None: all
    # [B, S] int64, by `masks.image_runs`: tokens of one run attend to each other both ways. An image lies in one pass,
    # the first.
    runs: Tensor | None = None
    step: int = QUERIES  # of a span

    def attend(self, layer: object, query: Tensor, key: Tensor, value: Tensor, *, scale: float | None) -> Tensor:
        """Add to the cache and attend: query [S, B, N, D], key and value [S, B, G, D] → [S, B, N·D]."""
        kept = self.rows.cache.add(layer, self.places, key.transpose(0, 1), value.transpose(0, 1))
        repeats = query.shape[2] // key.shape[2]  # torch's kernels that take masks know no groups
        keys, values = (x.repeat_interleave(repeats, dim=2).transpose(1, 2) for x in kept)
        outputs = [
            F.scaled_dot_product_attention(part.permute(1, 2, 0, 3), keys, values, attn_mask=mask, scale=scale)
            for part, mask in zip(query.split(self.step), self._masks(), strict=True)
        ]
        out = torch.cat(outputs, dim=2) if len(outputs) > 1 else outputs[0]
        return out.permute(2, 0, 1, 3).flatten(2)

    @cached_property
    def places(self) -> Tensor:
        """Return [B, S] int64: where the new positions lie in the cache."""
        return self.rows.starts[:, None] + torch.arange(self.positions, device=self.rows.starts.device)

    def _masks(self) -> Iterator[Tensor]:
        """Yield [B, 1, queries, L] bool for each span: which of the cache's positions its tokens attend to."""
        if self.positions <= self.step:
            yield self._whole
            return
        for first in range(0, self.positions, self.step):
            yield self._mask(slice(first, min(first + self.step, self.positions)))

    @cached_property
    def _whole(self) -> Tensor:
        return self._mask(slice(0, self.positions))

    def _mask(self, queries: slice) -> Tensor:
        places = self.places[:, queries, None]
        keys = torch.arange(self.rows.cache.length, device=places.device)
        allowed = keys <= places
        if self.runs is not None:
            own = self.runs[:, queries, None]
            together = (own == self.runs[:, None, :]) & (own > 0)
            allowed[..., : self.positions] |= together & (self.rows.starts == 0)[:, None, None]
        if self.window is not None:
            allowed &= keys > places - self.window
        return allowed[:, None]
