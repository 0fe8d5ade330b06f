"""Attention to rows sharded over context-parallel ranks, by an all-to-all over heads (Ulysses; Jacobs et al. 2023).

Before and after attention each rank has some positions of all heads, in attention all positions of some heads. The
exchange is its own inverse, and so its own gradient (megatron-core's `all_to_all`). Packing, masks and kernels are
those of one process, and every rank computes equally much however samples are packed.

If there are more ranks than heads allow, they form groups: heads are exchanged within a group, and each group gathers
all keys and values for its own queries (Llama 3). A row is sharded over the groups (`RowSplit`): each has two runs of
the row, one from either end, so that all groups compute equally many scores in a row of one sample.

Legend: S positions, B rows, C context-parallel ranks, E of them that exchange heads (C where there is one group), D
head width, V that of values, and on each of these ranks N query heads and G key/value heads before the exchange. K is
the number of groups, R = S/2K the positions of a run.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import gcd
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import all_to_all, gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megavlm.arch.dims import RowSplit
from megavlm.model.packing import Packing
from megavlm.parallel.groups import ContextGroups


@dataclass(frozen=True)
class CausalSpan:
    """Consecutive queries of one sequence, and its keys up to the last query."""

    queries: slice  # among the flattened [B·S/K] of a group
    keys: slice  # among the flattened [B·S]


def causal_spans(bounds: Sequence[int], *, rows: int, split: RowSplit, group: int) -> tuple[CausalSpan, ...]:
    """Return the spans of a group's queries, in order, for the sequences between `bounds`: 0, …, B·S."""
    length = bounds[-1] // rows
    run = length // split.runs
    spans = []
    for row in range(rows):
        for place, number in enumerate((group, split.runs - 1 - group)):
            first, local = row * length + number * run, (2 * row + place) * run
            sequence = bisect_right(bounds, first) - 1
            while bounds[sequence] < first + run:
                start, end = bounds[sequence : sequence + 2]
                begin, last = max(start, first), min(end, first + run)
                spans.append(CausalSpan(slice(local + begin - first, local + last - first), slice(start, last)))
                sequence += 1
    return tuple(spans)


def in_order_of_rows(gathered: Tensor, groups: int) -> Tensor:
    """Return whole rows [S, …] from the parts of all groups [K·2R, …], which are runs from either end of a row."""
    runs = gathered.unflatten(0, (groups, 2, -1))
    return torch.cat([runs[:, 0], runs[:, 1].flip(0)]).flatten(0, 1)


def own_runs(whole: Tensor, groups: int, group: int) -> Tensor:
    """Return a group's part [2R, …] of whole rows [S, …]: a run from either end."""
    runs = whole.unflatten(0, (2 * groups, -1))
    return torch.cat([runs[group], runs[2 * groups - 1 - group]])


def attend_to_earlier(
    query: Tensor, key: Tensor, value: Tensor, spans: Sequence[CausalSpan], attend: Callable[..., Tensor]
) -> Tensor:
    """Return the causal attention [S/K, B, N·D] of query [S/K, B, N, D] to key and value [S, B, G, D]."""
    from torch.nn.attention.bias import causal_lower_right  # it imports torch's compiler, which other runs do without

    rows = query.shape[1]
    q, k, v = (x.transpose(0, 1).flatten(0, 1) for x in (query, key, value))
    outputs = []
    for span in spans:
        heads = [x[part].transpose(0, 1)[None] for x, part in ((q, span.queries), (k, span.keys), (v, span.keys))]
        mask = causal_lower_right(heads[0].shape[2], heads[1].shape[2])
        outputs.append(attend(*heads, mask=mask)[0].transpose(0, 1).flatten(1))
    return torch.cat(outputs).unflatten(0, (rows, -1)).transpose(0, 1)


@cache
def across_context(attention: type) -> type:
    """Return a subclass of the core attention `attention` for rows that are sharded over context-parallel ranks.

    In generation each rank has whole rows, like the key/value cache, and nothing is exchanged.
    """

    class ContextAttention(attention):  # type: ignore[misc, unused-ignore]
        def __init__(self, config: TransformerConfig, *args: Any, context: ContextGroups, **kwargs: Any) -> None:
            super().__init__(with_own_heads(config, context.split.heads), *args, **kwargs)
            self.context = context

        def own_sinks(self) -> Tensor | None:
            sinks: Tensor | None = super().own_sinks()
            return None if sinks is None else sinks.chunk(self.context.split.heads)[self.context.heads.rank()]

        def forward(
            self,
            query: Tensor,
            key: Tensor,
            value: Tensor,
            *args: Any,
            packed_seq_params: Packing | None = None,
            **kwargs: Any,
        ) -> Tensor:
            """Return the attention [S/C, B, N·V] of query [S/C, B, N, D], key [S/C, B, G, D] and value [S/C, B, G, V].

            Key and value may also be those of whole rows, [S, B, G, ·], if no heads are exchanged.
            """
            packing, width, ranks = packed_seq_params, value.shape[-1], self.context.split.heads
            if packing is not None and packing.cached is not None:
                return super().forward(query, key, value, *args, packed_seq_params=packing, **kwargs)
            if ranks > 1:
                heads = query, key, value
                sent, sizes = heads_for_ranks(heads, ranks)
                parts = rows_of_ranks(all_to_all(self.context.heads, sent)).split(sizes, dim=2)
                query, key, value = (x.unflatten(2, (-1, each.shape[3])) for x, each in zip(parts, heads, strict=True))
            if self.context.split.groups == 1:
                out = super().forward(query, key, value, *args, packed_seq_params=packing, **kwargs)
            else:
                assert packing is not None, "the spans of queries"
                if key.shape[0] == query.shape[0]:
                    key, value = gathered((key, value), self.context.keys)
                out = attend_to_earlier(query, key, value, packing.causal, self._attend)
            outputs = out.unflatten(0, (ranks, -1)).unflatten(-1, (-1, width))
            return heads_of_ranks(all_to_all(self.context.heads, outputs))

    return ContextAttention


def gathered(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> list[Tensor]:
    """Return the whole rows [S, B, heads, width] of tensors that are sharded over the ranks of a group."""
    flat = [x.flatten(2) for x in tensors]
    whole = gather_from_sequence_parallel_region(torch.cat(flat, dim=2), group=group)
    parts = in_order_of_rows(whole, group.size()).split([x.shape[2] for x in flat], dim=2)
    return [part.unflatten(2, x.shape[2:]) for part, x in zip(parts, tensors, strict=True)]


def with_own_heads(config: TransformerConfig, ranks: int) -> TransformerConfig:
    """Return the configuration of attention with the heads that a rank has after the exchange."""
    own = config.num_query_groups // config.tensor_model_parallel_size
    return replace(
        config,
        num_attention_heads=config.num_attention_heads // ranks,
        num_query_groups=config.num_query_groups * copies_of_heads(own, ranks) // ranks,
    )


def copies_of_heads(heads: int, ranks: int) -> int:
    """Return how often heads must be repeated to be divisible by `ranks`: lcm(heads, ranks) / heads."""
    return ranks // gcd(heads, ranks)


def heads_for_ranks(tensors: Sequence[Tensor], ranks: int) -> tuple[Tensor, list[int]]:
    """Return the heads to send to each of E ranks, [E, S/C, B, channels], and the number of channels of each tensor.

    Each rank gets equally many consecutive heads of each tensor [S/C, B, heads, width]. Key/value heads that E does not
    divide are repeated. As E divides the N query heads, lcm(G, E) divides them too: each rank has the keys of its
    queries.
    """
    repeated = [x.repeat_interleave(copies_of_heads(x.shape[2], ranks), dim=2) for x in tensors]
    parts = [x.unflatten(2, (ranks, -1)).flatten(3) for x in repeated]
    return torch.cat(parts, dim=3).permute(2, 0, 1, 3), [x.shape[3] for x in parts]


def rows_of_ranks(parts: Tensor) -> Tensor:
    """Return the group's rows [E·S/C, B, …] from the parts [E, S/C, B, …] that ranks have sent."""
    return parts.flatten(0, 1)


def heads_of_ranks(parts: Tensor) -> Tensor:
    """Return all heads [S/C, B, N·D] from the parts [E, S/C, B, N/E, D] that ranks have sent."""
    return parts.permute(1, 2, 0, 3, 4).flatten(2)
