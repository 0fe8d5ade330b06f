"""Self-attention with rotary positions, on `scaled_dot_product_attention`: full, causal, block-diagonal, or by masks.

`CoreAttention` stands where megatron-core's DotProductAttention would: that one materialises the score matrix and
refuses packed sequences. Legend: S positions, B samples, N local query heads, G local key/value heads, D head width.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from megavlm.config.tensor_split import HeadSplit
from megavlm.model import varlen
from megavlm.model.masks import attend_in_spans
from megavlm.model.packing import Packing, in_rows, in_sequence
from megavlm.model.rotary import Heads, Rotary, Rotation
from megavlm.model.shared_heads import SharedHeads

# For packed sequences: cuDNN, which torch prefers on Hopper, plans anew for each number and length of sequences.
ANY_SHAPE = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class Attention(SelfAttention):
    """megatron-core's self-attention, with `rotary` in place of its own positions: those take cos and sin anew in each
    layer and copy queries and keys four times more often.
    """

    def __init__(self, *args: Any, rotary: Rotary, split: HeadSplit, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.rotary, self.split = rotary, split
        self.shared_heads = SharedHeads(split, self.tp_group) if split.copies > 1 else None
        self.rotation: Rotation | None = None
        self.padding: Tensor | None = None

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        *,
        rotary_pos_emb: Rotation | None = None,
        packed_seq_params: Packing | None = None,
        **kwargs: Any,
    ) -> Any:
        self.rotation = rotary_pos_emb  # read during this call only, by the method below
        self.padding = None if packed_seq_params is None else packed_seq_params.padding
        output = super().forward(hidden_states, attention_mask, packed_seq_params=packed_seq_params, **kwargs)
        self.rotation = self.padding = None
        return output

    def get_query_key_value_tensors(
        self, hidden_states: Tensor, key_value_states: Tensor | None = None, **kwargs: Any
    ) -> Heads:
        """Queries, keys and values of the hidden states, normalised and turned; queries of padding may be zeros."""
        query, key, value = self._turned_heads(hidden_states, key_value_states)
        if self.padding is not None:
            query = query.masked_fill(self.padding[..., None, None], 0.0)
        return query, key, value

    def _turned_heads(self, hidden_states: Tensor, key_value_states: Tensor | None) -> Heads:
        rotary, turns = self.rotary, self.rotation
        if self.shared_heads is not None:
            query, key, value = self.shared_heads(self.linear_qkv(hidden_states)[0])
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


class CoreAttention(nn.Module):
    """softmax(q·kᵀ/√D)·v per sequence."""

    joins_lengths = True  # whether sequences of several lengths may be one call

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

        Packed sequences lie along the flattened [B·S], row by row: none goes over the end of its row. They are one call
        where torch has one, else one for each run of equal lengths.
        """
        causal = attn_mask_type in (AttnMaskType.causal, AttnMaskType.padding_causal)
        if packed_seq_params is None:
            out = self._attend(*(x.permute(1, 2, 0, 3) for x in (query, key, value)), causal=causal)
            return out.permute(2, 0, 1, 3).flatten(2)
        if packed_seq_params.cached is not None:
            return packed_seq_params.cached.attend(self, query, key, value, scale=self.scale)
        q, k, v = (in_sequence(packed_seq_params, x) for x in (query, key, value))
        if packed_seq_params.masked:
            with sdpa_kernel(ANY_SHAPE):
                out = attend_in_spans(q, k, v, packed_seq_params.masked, self._attend)
            return in_rows(packed_seq_params, out, rows=query.shape[1])
        drops = self.dropout > 0 and self.training
        if self.joins_lengths and not drops and varlen.takes(q, k):
            out = varlen.attend_in_all(q, k, v, packed_seq_params, causal=causal, scale=self.scale)
        else:
            with sdpa_kernel(ANY_SHAPE):
                out = self._attend_run_by_run(q, k, v, packed_seq_params, causal=causal)
        return in_rows(packed_seq_params, out, rows=query.shape[1])

    def _attend_run_by_run(
        self, query: Tensor, key: Tensor, value: Tensor, packing: Packing, *, causal: bool
    ) -> Tensor:
        """[T, heads, D] each → [T, N·D], equally long sequences in one call."""
        outputs = []
        for start, count, length in packing.runs:
            span = slice(start, start + count * length)
            batched = (x[span].unflatten(0, (count, length)).transpose(1, 2) for x in (query, key, value))
            out = self._attend(*batched, causal=causal)
            outputs.append(out.transpose(1, 2).reshape(count * length, -1))
        return torch.cat(outputs) if len(outputs) > 1 else outputs[0]

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, *, causal: bool = False, mask: Tensor | None = None
    ) -> Tensor:
        """[B, heads, S, D] each → [B, N, S, D]."""
        arguments: dict[str, Any] = {
            "attn_mask": mask,
            "is_causal": causal,
            "scale": self.scale,
            "enable_gqa": query.shape[1] != key.shape[1],
        }
        if not self.dropout or not self.training:
            return F.scaled_dot_product_attention(query, key, value, **arguments)
        with get_cuda_rng_tracker().fork():
            return F.scaled_dot_product_attention(query, key, value, dropout_p=self.dropout, **arguments)
