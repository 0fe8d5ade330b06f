"""Attention of some positions of rows to all earlier ones, of which a rank has gathered keys and values (Llama 3).

Where context-parallel ranks cannot exchange all heads, groups of them share the positions of a row (`RowSplit`). Each
has two runs of it, one from either end, so that all have equally many scores in a row of one sample.

Legend: S positions, B rows, K groups, R = S/2K positions of a run, N query heads, G key/value heads, D head width.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from megavlm.arch.dims import RowSplit


@dataclass(frozen=True)
class CausalSpan:
    """Consecutive queries of one sequence, and its keys up to the last of them."""

    queries: slice  # among the flattened [B·S/K] of a group
    keys: slice  # among the flattened [B·S]


def causal_spans(bounds: Sequence[int], *, rows: int, split: RowSplit, group: int) -> tuple[CausalSpan, ...]:
    """Return the spans of a group's queries, in their order, of sequences between `bounds`: 0, …, B·S."""
    length = bounds[-1] // rows
    run = length // split.runs
    found = []
    for row in range(rows):
        for place, number in enumerate((group, split.runs - 1 - group)):
            first, local = row * length + number * run, (2 * row + place) * run
            sequence = bisect_right(bounds, first) - 1
            while bounds[sequence] < first + run:
                start, end = bounds[sequence : sequence + 2]
                begin, last = max(start, first), min(end, first + run)
                found.append(CausalSpan(slice(local + begin - first, local + last - first), slice(start, last)))
                sequence += 1
    return tuple(found)


def in_order_of_rows(gathered: Tensor, groups: int) -> Tensor:
    """Return whole rows [S, …] of the parts of all groups [K·2R, …], each of a run from either end."""
    runs = gathered.unflatten(0, (groups, 2, -1))
    return torch.cat([runs[:, 0], runs[:, 1].flip(0)]).flatten(0, 1)


def attend_to_earlier(
    query: Tensor, key: Tensor, value: Tensor, spans: Sequence[CausalSpan], attend: Callable[..., Tensor]
) -> Tensor:
    """query [S/K, B, N, D], key and value [S, B, G, D] → [S/K, B, N·D]."""
    rows = query.shape[1]
    q, k, v = (x.transpose(0, 1).flatten(0, 1) for x in (query, key, value))
    outputs = []
    for span in spans:
        heads = [x[part].transpose(0, 1)[None] for x, part in ((q, span.queries), (k, span.keys), (v, span.keys))]
        mask = causal_lower_right(heads[0].shape[2], heads[1].shape[2])
        outputs.append(attend(*heads, mask=mask)[0].transpose(0, 1).flatten(1))
    return torch.cat(outputs).unflatten(0, (rows, -1)).transpose(0, 1)
