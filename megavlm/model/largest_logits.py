"""Attention that also takes the largest logit of each query head, for `--qk-clip` (`optim/qk_clip.py`).

torch's kernels keep logits to themselves, so that they are computed a second time, in fp32 and some queries at a time.
Legend: B samples, N local query heads, G local key/value heads, S queries, K keys, D head width.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.attention.bias import CausalBias

from megavlm.arch.transformer import logits_at_once
from megavlm.model.attention import CoreAttention


class LogitAttention(CoreAttention):
    """`CoreAttention` that keeps the largest logit of each head over training passes, until it is cleared.

    `largest` [N] float64 is 0 where no logit is positive. Queries of zeros therefore count for nothing: so are those of
    padding (`Packing.padding`). A layer that is recomputed is looked at in the pass with gradients alone.
    """

    joins_lengths = False
    largest: Tensor

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        heads = config.num_attention_heads // config.tensor_model_parallel_size
        self.register_buffer("largest", torch.zeros(heads, dtype=torch.float64), persistent=False)

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, *, causal: bool = False, mask: Tensor | None = None
    ) -> Tensor:
        if self.training and torch.is_grad_enabled():
            found = largest_logits(query, key, scale=self.scale, causal=causal, mask=mask)
            torch.maximum(self.largest, found.double(), out=self.largest)
        return super()._attend(query, key, value, causal=causal, mask=mask)


@torch.no_grad()
def largest_logits(
    query: Tensor,
    key: Tensor,
    *,
    scale: float | None,
    causal: bool,
    mask: Tensor | None = None,
    most: int | None = None,
) -> Tensor:
    """Return the largest attention logit, scale · q·kᵀ, of each head, [N] float32; 0 where all are negative.

    Args:
        query: [B, N, S, D].
        key: [B, G, K, D].
        scale: 1/√D if it is None.
        causal: the last query attends to all keys, each one before it to one key less.
        mask: [S, K] of 0 and −∞, added to the logits; or torch's `causal_lower_right`, which is `causal`.
        most: logits in memory at a time, unless those of one query are more; default: `logits_at_once`.
    """
    _, heads, length, width = query.shape
    groups, keys = key.shape[1:3]
    if isinstance(mask, CausalBias):
        causal, mask = True, None
    most = most or logits_at_once(on_gpu=query.is_cuda)
    together = max(1, most // (heads * keys))
    samples, step = max(1, together // length), min(together, length)
    found = query.new_zeros(groups, heads // groups).float()
    for q, k in zip(query.split(samples), key.split(samples), strict=True):
        for first in range(0, length, step):
            part = q[:, :, first : first + step].unflatten(1, (groups, -1))  # [b, G, N/G, s, D]
            count = part.shape[3]
            last = first + count + keys - length if causal else keys
            logits = _products(part.flatten(0, 1).flatten(1, 2), k[:, :, :last].flatten(0, 1))
            logits = logits.unflatten(0, (-1, groups)).unflatten(2, (-1, count))
            if causal:  # only the last keys are later than some of these queries
                places = torch.arange(count, device=q.device)
                logits[..., -count:].masked_fill_(places > places[:, None], -torch.inf)
            if mask is not None:
                logits += mask[first : first + count]
            found = torch.maximum(found, logits.amax((0, 3, 4)))
    return found.flatten() * (width**-0.5 if scale is None else scale)


def _products(query: Tensor, key: Tensor) -> Tensor:
    """Return q·kᵀ in fp32 of query [·, S, D] and key [·, K, D].

    A GPU takes halves as they are: their products are exact in fp32, in which it adds them up.
    """
    if query.is_cuda and query.dtype != torch.float32:
        return torch.bmm(query, key.mT, out_dtype=torch.float32)
    return query.float() @ key.float().mT
