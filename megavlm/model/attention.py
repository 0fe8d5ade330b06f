"""Self-attention with rotary positions, on `scaled_dot_product_attention`: full, causal, or block-diagonal.

`CoreAttention` stands where megatron-core's DotProductAttention would: that one materialises the score matrix and
refuses packed sequences. Legend: S positions, B samples, N local query heads, G local key/value heads, D head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from megavlm.model.rotary import Heads, Rotary, Rotation

Run = tuple[int, int, int]  # (start, sequences, length)


class Attention(SelfAttention):
    """megatron-core's self-attention, with `rotary` in place of its own positions: those take cos and sin anew in each
    layer and copy queries and keys four times more often.
    """

    def __init__(self, *args: Any, rotary: Rotary, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.rotary = rotary
        self.rotation: Rotation | None = None

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        *,
        rotary_pos_emb: Rotation | None = None,
        **kwargs: Any,
    ) -> Any:
        self.rotation = rotary_pos_emb  # read during this call only, by the method below
        output = super().forward(hidden_states, attention_mask, **kwargs)
        self.rotation = None
        return output

    def get_query_key_value_tensors(
        self, hidden_states: Tensor, key_value_states: Tensor | None = None, **kwargs: Any
    ) -> Heads:
        """Queries, keys and values of the hidden states, normalised and turned."""
        rotary, turns = self.rotary, self.rotation
        if self.config.num_query_groups < self.world_size:  # ranks share a head: megatron-core finds their part of it
            query, key, value = super().get_query_key_value_tensors(hidden_states, key_value_states)
        else:
            mixed, sizes = super().get_query_key_value_tensors(hidden_states, key_value_states, split_qkv=False)
            if turns is not None and self.q_layernorm is None:
                return rotary.split_and_rotate(mixed, sizes, turns)
            query, key, value = rotary.split(mixed, sizes)
            if self.q_layernorm is not None:
                query, key = self.q_layernorm(query), self.k_layernorm(key)
        if turns is not None:
            query, key = rotary.rotate(query, turns), rotary.rotate(key, turns)
        return query, key, value


@dataclass
class Packing(PackedSeqParams):
    """Sequences that lie one after the other, with their runs on the host: no layer has to ask the device for them."""

    runs: tuple[Run, ...] = ()


def packed(bounds: Sequence[int], device: torch.device) -> Packing:
    """Sequences between `bounds`: 0, …, S. The layout stays [S, 1, heads, width] ("sbhd"): rotary angles come per
    position.
    """
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32).to(device, non_blocking=True)
    longest = max(end - start for start, end in pairwise(bounds))
    return Packing(
        qkv_format="sbhd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        runs=_runs(bounds),
    )


class CoreAttention(nn.Module):
    """softmax(q·kᵀ/√D)·v per sequence."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        cp_comm_type: str | None = None,
        softmax_scale: float | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__()
        assert config.context_parallel_size == 1, "context parallelism is refused by the configuration rules"
        self.dropout = config.attention_dropout
        self.scale = softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Packing | None = None,
    ) -> Tensor:
        """query [S, B, N, D], key and value [S, B, G, D] → [S, B, N·D].

        Packed sequences lie along the flattened [B·S], row by row: none goes over the end of its row.
        """
        causal = attn_mask_type in (AttnMaskType.causal, AttnMaskType.padding_causal)
        if packed_seq_params is None:
            out = self._attend(*(x.permute(1, 2, 0, 3) for x in (query, key, value)), causal=causal)
            return out.permute(2, 0, 1, 3).flatten(2)
        rows = query.shape[1]
        if rows > 1:
            query, key, value = (x.transpose(0, 1).flatten(0, 1).unsqueeze(1) for x in (query, key, value))
        outputs = []
        for start, count, length in packed_seq_params.runs:
            span = slice(start, start + count * length)
            outputs.append(self._attend_run(query[span], key[span], value[span], count=count, causal=causal))
        out = torch.cat(outputs) if len(outputs) > 1 else outputs[0]
        return out if rows == 1 else out.view(rows, -1, out.shape[-1]).transpose(0, 1)

    def _attend_run(self, query: Tensor, key: Tensor, value: Tensor, *, count: int, causal: bool) -> Tensor:
        """`count` sequences of equal length, one after the other: [count·L, 1, heads, D] → [count·L, 1, N·D]."""
        batched = (x.view(count, -1, *x.shape[2:]).transpose(1, 2) for x in (query, key, value))
        out = self._attend(*batched, causal=causal)
        return out.transpose(1, 2).reshape(query.shape[0], 1, -1)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, *, causal: bool) -> Tensor:
        """[B, heads, S, D] each → [B, N, S, D]."""
        arguments: dict[str, Any] = {
            "is_causal": causal,
            "scale": self.scale,
            "enable_gqa": query.shape[1] != key.shape[1],
        }
        if not self.dropout or not self.training:
            return F.scaled_dot_product_attention(query, key, value, **arguments)
        with get_cuda_rng_tracker().fork():
            return F.scaled_dot_product_attention(query, key, value, dropout_p=self.dropout, **arguments)


def _runs(bounds: Sequence[int]) -> tuple[Run, ...]:
    """Runs of equally long sequences, so that each is one batched call."""
    lengths = [end - start for start, end in pairwise(bounds)]
    runs, start = [], 0
    for length, group in groupby(lengths):
        count = len(list(group))
        if length:
            runs.append((start, count, length))
        start += count * length
    return tuple(runs)
