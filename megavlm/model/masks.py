"""Attention by masks: sliding windows, and images whose tokens attend to one another both ways.

Transformer Engine and FlashAttention know windows, but no image inside a causal sequence. So layers that need a mask
take torch's `scaled_dot_product_attention` on every device, span by span (`arch/masks.py`): what a mask of one span has
no room for is not computed. Legend: T tokens of all rows, N query heads, G key/value heads, D head width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megavlm.arch.masks import QUERIES, spans_of


@dataclass(frozen=True)
class MaskedSpan:
    """Some consecutive queries, the keys that they may attend to, and what is added to their scores."""

    queries: slice
    keys: slice
    mask: Tensor  # [queries, keys], 0 or −∞


def image_runs(tokens: Tensor, image_token: int, features: Sequence[int]) -> Tensor:
    """Return in which run of image tokens each token is, [T] int64; 0 for text.

    A run is made of consecutive tokens of one image. Transformers joins images with no token between them to one run;
    the processors of such models never write those.

    Args:
        tokens: [B, S], rows one after the other.
        features: tokens of each image, in order.
    """
    flat = tokens.flatten()
    is_image = flat == image_token
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
    step: int = QUERIES,
) -> tuple[MaskedSpan, ...]:
    """Return the spans of sequences between `bounds` (0, …, T) with their masks.

    A token attends to tokens of its own sequence: to those before it and itself, and to all of its run. Where there is
    a window, those before the last `window` tokens are left out, of its run as well.

    Args:
        runs: of `image_runs`; None where no token attends to later ones.
        longest: tokens of the longest run.
    """
    lengths = torch.tensor(bounds, dtype=torch.int64).diff()
    sequence = torch.arange(len(lengths)).repeat_interleave(lengths).to(device, non_blocking=True)
    places = torch.arange(bounds[-1], device=device)
    found = []
    for span in spans_of(bounds, window=window, longest=longest, step=step):
        queries, keys = (slice(part.start, part.stop) for part in (span.queries, span.keys))
        query, key = places[queries, None], places[None, keys]
        allowed = key <= query
        if runs is not None:
            allowed |= (runs[queries, None] == runs[None, keys]) & (runs[queries, None] > 0)
        allowed &= sequence[queries, None] == sequence[None, keys]
        if window is not None:
            allowed &= key > query - window
        mask = torch.zeros(allowed.shape, device=device, dtype=dtype).masked_fill_(~allowed, -torch.inf)
        found.append(MaskedSpan(queries, keys, mask))
    return tuple(found)


def attend_in_spans(
    query: Tensor, key: Tensor, value: Tensor, spans: Sequence[MaskedSpan], attend: Callable[..., Tensor]
) -> Tensor:
    """Return the attention of query [T, N, D] to key and value [T, G, D] by masks, [T, N·D].

    `attend` takes heads as [1, N, queries or keys, D], and the mask. Keys and values are repeated for the queries of
    their group, because torch's kernels that take masks know no groups.
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
