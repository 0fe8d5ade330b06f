"""Masked attention: sliding windows, and images or prefixes whose tokens attend to one another in both directions.

Transformer Engine and FlashAttention support windows, but not an image inside a causal sequence. So layers that need a
mask use torch's `scaled_dot_product_attention` on every device, span by span (`arch/layer_sizes.py`), which skips the
scores outside of spans.

`CachedAttention` attends to a key/value cache. For one new token the time goes to reading the cache, which torch's
`scaled_dot_product_attention` with a mask does once. A long prompt attends span by span, because one mask for all of it
would have as many bytes as the square of its length.

Legend: T tokens of all rows, B rows, S new positions, L positions of the cache, N query heads, G key/value heads, D
head width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megavlm.arch.layer_sizes import QUERIES, spans_of
from megavlm.inputs.batch import Continuation


@dataclass(frozen=True)
class MaskedSpan:
    """Consecutive queries, the keys that they may attend to, and the mask that is added to their scores."""

    queries: slice
    keys: slice
    mask: Tensor  # [queries, keys], 0 or −∞


def image_runs(tokens: Tensor, image_token: int, features: Sequence[int], video_token: int | None = None) -> Tensor:
    """Return for each token the number of its run of image tokens, [T] int64; 0 for text.

    A run consists of consecutive tokens of one image, or of one frame of a video. Transformers joins images with no
    token between them to one run, but the processors of these models never write adjacent images.

    Args:
        tokens: [B, S], rows one after the other.
        features: tokens of each image, in order.
    """
    flat = tokens.flatten()
    is_image = flat == image_token
    if video_token is not None:
        is_image |= flat == video_token
    ends = torch.tensor(features, dtype=torch.int64).cumsum(0).to(flat.device, non_blocking=True)
    image = torch.where(is_image, torch.bucketize(is_image.cumsum(0) - 1, ends, right=True), -1)
    starts = is_image & (image != F.pad(image, (1, 0), value=-1)[:-1])
    return torch.where(is_image, starts.cumsum(0), 0)


def masked_spans(
    bounds: Sequence[int],
    *,
    window: int | None,
    runs: Tensor | None,
    longest: int,
    device: torch.device,
    dtype: torch.dtype,
    beyond: bool = False,
    step: int = QUERIES,
) -> tuple[MaskedSpan, ...]:
    """Return the spans of the sequences between `bounds` (0, …, T), with their masks.

    A token attends to tokens of its own sequence: to itself and earlier tokens, and to all tokens of its run. A window
    masks tokens `window` or more positions earlier, also in the token's run unless runs go `beyond` windows.

    Args:
        runs: the run of each token by `image_runs` or `prefix_runs`; None if attention is causal.
        longest: tokens of the longest run.
    """
    lengths = torch.tensor(bounds, dtype=torch.int64).diff()
    sequence = torch.arange(len(lengths)).repeat_interleave(lengths).to(device, non_blocking=True)
    places = torch.arange(bounds[-1], device=device)
    masked = []
    reach = max(window, longest) if beyond and window is not None else window
    for span in spans_of(bounds, window=reach, longest=longest, step=step):
        queries, keys = (slice(part.start, part.stop) for part in (span.queries, span.keys))
        query, key = places[queries, None], places[None, keys]
        allowed = key <= query
        near = True if window is None else key > query - window
        if beyond:
            allowed &= near
        if runs is not None:
            allowed |= (runs[queries, None] == runs[None, keys]) & (runs[queries, None] > 0)
        allowed &= sequence[queries, None] == sequence[None, keys]
        if not beyond:
            allowed &= near
        mask = torch.zeros(allowed.shape, device=device, dtype=dtype).masked_fill_(~allowed, -torch.inf)
        masked.append(MaskedSpan(queries, keys, mask))
    return tuple(masked)


def prefix_runs(prefixes: Sequence[tuple[int, int]], length: int, device: torch.device) -> Tensor:
    """Return for each of `length` tokens the number of its prefix, [T] int64; 0 after a prefix.

    Args:
        prefixes: for each sample, the place of its first token and the number of tokens of its prefix.
    """
    runs = torch.zeros(length, dtype=torch.int64)
    for number, (first, count) in enumerate(prefixes, start=1):
        runs[first : first + count] = number
    return runs.to(device, non_blocking=True)


class _EagerAttention(torch.autograd.Function):
    """Attention with scores c · tanh(x / c), x = scale · q·kᵀ, or with sinks. The backward pass recomputes the scores.

    With t = tanh(x / c), p = softmax(c · t) and δ the gradient of the output, the gradient of x is
    p · (δ·vᵀ − Σ p · δ·vᵀ) · (1 − t²). The sink of a head is one more score s, with p = 1 − Σ p of the keys and the
    value 0, so that its gradient is −(1 − Σ p) · Σ p · δ·vᵀ.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor,
        sinks: Tensor | None,
        scale: float,
        softcap: float | None,
    ) -> Tensor:
        ctx.save_for_backward(query, key, value, mask, sinks)
        ctx.scale, ctx.softcap = scale, softcap
        _, weights = _EagerAttention.scores(query, key, mask, sinks, scale, softcap)
        return weights.to(value.dtype) @ value

    @staticmethod
    def scores(
        query: Tensor, key: Tensor, mask: Tensor, sinks: Tensor | None, scale: float, softcap: float | None
    ) -> tuple[Tensor | None, Tensor]:
        """Return t and p, in fp32; t is None without a softcap."""
        bent, scores = None, query.float() @ key.float().mT
        if softcap is None:
            scores.mul_(scale)
        else:
            bent = scores.mul_(scale / softcap).tanh_()
            scores = bent * softcap
        scores.add_(mask)
        if sinks is None:
            return bent, torch.softmax(scores, dim=-1)
        sink = sinks.float()[:, None, None]
        largest = torch.maximum(scores.amax(-1, keepdim=True), sink)
        shares = scores.sub_(largest).exp_()
        return bent, shares.div_(shares.sum(-1, keepdim=True) + (sink - largest).exp())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, mask, sinks = ctx.saved_tensors
        bent, weights = _EagerAttention.scores(query, key, mask, sinks, ctx.scale, ctx.softcap)
        of_value = weights.to(value.dtype).mT @ grad
        of_scores = grad.float() @ value.float().mT  # first of the weights
        mean, of_sinks = (of_scores * weights).sum(-1, keepdim=True), None
        if sinks is not None:
            of_sinks = (mean * (weights.sum(-1, keepdim=True) - 1)).sum((0, 2, 3)).to(sinks.dtype)
        of_scores.sub_(mean).mul_(weights).mul_(ctx.scale)
        if bent is not None:
            of_scores.mul_(bent.square_().neg_().add_(1))
        of_scores = of_scores.to(query.dtype)
        return of_scores @ key, of_scores.mT @ query, of_value, None, of_sinks, None, None


def eager_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor,
    scale: float | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Return the attention [B, N, S, D] of heads [B, N, S or keys, D] with a softcap, after which the mask is added, or
    with sinks [N].
    """
    given = query.shape[-1] ** -0.5 if scale is None else scale
    return _EagerAttention.apply(query, key, value, mask, sinks, given, softcap)


def attend_in_spans(
    query: Tensor, key: Tensor, value: Tensor, spans: Sequence[MaskedSpan], attend: Callable[..., Tensor]
) -> Tensor:
    """Return the masked attention of query [T, N, D] to key and value [T, G, D], as [T, N·D].

    `attend` takes heads as [1, N, queries or keys, D], and the mask. Keys and values are repeated for the queries of
    their group, because torch's kernels with masks do not support groups.
    """
    repeats = query.shape[1] // key.shape[1]
    if repeats > 1:
        key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
    query, key, value = (x.transpose(0, 1)[None] for x in (query, key, value))
    outputs: list[Any] = [
        attend(query[:, :, span.queries], key[:, :, span.keys], value[:, :, span.keys], mask=span.mask)
        for span in spans
    ]
    out = torch.cat(outputs, dim=2) if len(outputs) > 1 else outputs[0]
    return out[0].transpose(0, 1).flatten(1)


@dataclass(frozen=True, eq=False)
class CachedAttention:
    """Attention of S new tokens of each row to all earlier tokens in a key/value cache, and to themselves."""

    rows: Continuation
    positions: int  # S
    window: int | None = None  # how many of the last tokens a token attends to; None: all
    # [B, S] int64, by `masks.image_runs`: tokens of one run attend to each other both ways. An image lies in one pass,
    # the first.
    runs: Tensor | None = None
    step: int = QUERIES  # of a span
    beyond: bool = False  # whether a run reaches beyond the window

    def attend(
        self,
        layer: object,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float | None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Add key and value [S, B, G, D] to the cache, and return the attention [S, B, N·D] of query [S, B, N, D]."""
        cached = self.rows.cache.add(layer, self.places, key.transpose(0, 1), value.transpose(0, 1))
        repeats = query.shape[2] // key.shape[2]  # torch's kernels with masks do not support groups
        keys, values = (x.repeat_interleave(repeats, dim=2).transpose(1, 2) for x in cached)
        outputs = []
        for part, mask in zip(query.split(self.step), self._masks(), strict=True):
            heads = part.permute(1, 2, 0, 3)
            if softcap is None and sinks is None:
                out = F.scaled_dot_product_attention(heads, keys, values, attn_mask=mask, scale=scale)
            else:
                added = torch.zeros(mask.shape, device=mask.device).masked_fill_(~mask, -torch.inf)
                out = eager_attention(heads, keys, values, mask=added, scale=scale, softcap=softcap, sinks=sinks)
            outputs.append(out)
        out = torch.cat(outputs, dim=2) if len(outputs) > 1 else outputs[0]
        return out.permute(2, 0, 1, 3).flatten(2)

    @cached_property
    def places(self) -> Tensor:
        """Return the indices of the new positions in the cache, [B, S] int64."""
        return self.rows.starts[:, None] + torch.arange(self.positions, device=self.rows.starts.device)

    def _masks(self) -> Iterator[Tensor]:
        """Yield the mask of each span over the positions of the cache, [B, 1, queries, L] bool."""
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
        near = True if self.window is None else keys > places - self.window
        if self.beyond:
            allowed &= near
        if self.runs is not None:
            own = self.runs[:, queries, None]
            together = (own == self.runs[:, None, :]) & (own > 0)
            allowed[..., : self.positions] |= together & (self.rows.starts == 0)[:, None, None]
        if not self.beyond:
            allowed &= near
        return allowed[:, None]
