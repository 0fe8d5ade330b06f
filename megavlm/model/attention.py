"""Self-attention with rotary embedding on `scaled_dot_product_attention`: full, causal, block-diagonal or masked.

`CoreAttention` replaces megatron-core's DotProductAttention, which materialises the score matrix and refuses packed
sequences. Tensor-parallel ranks may share key/value heads, or have query heads of zeros (`arch/tensor_split.py`).
`LogitAttention` also records the largest logit of each query head, for `--qk-clip` (`optim/qk_clip.py`).

Legend: S positions, B samples, N local query heads, G local key/value heads, D head width. With shared heads: L slots
of a rank, R query heads of a slot, C slots of a key/value head, w = ⌈D/C⌉ channels of a key (and of a value) that a
slot projects.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import all_to_all
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from megavlm.arch.tensor_split import HeadSplit
from megavlm.arch.transformer import logits_at_once
from megavlm.model.masks import attend_in_spans, eager_attention
from megavlm.model.packing import Packing, attend_in_all, fits_one_call, in_rows, in_sequence
from megavlm.model.rotary import Rotary, Rotation

# Backends for packed sequences. torch prefers cuDNN on Hopper, which plans again for each number and length of them.
ANY_SHAPE = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class TurnedHeads:
    """Mixin in front of megatron-core's attention: applies rotary embedding itself, and zeros queries of padding.

    megatron-core recomputes cos and sin in each layer, and copies queries and keys four times more often.
    """

    rotation: Rotation | None = None
    packing: Packing | None = None

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        *,
        rotary_pos_emb: Rotation | None = None,
        packed_seq_params: Packing | None = None,
        **kwargs: Any,
    ) -> Any:
        self.rotation = rotary_pos_emb  # the methods below read both, during this call only
        self.packing = packed_seq_params
        output = super().forward(  # type: ignore[misc]
            hidden_states, attention_mask, packed_seq_params=packed_seq_params, **kwargs
        )
        self.rotation = self.packing = None
        return output

    def get_query_key_value_tensors(
        self, hidden_states: Tensor, key_value_states: Tensor | None = None, **kwargs: Any
    ) -> tuple[Tensor, ...]:
        """Return queries and keys after norm and rotary embedding, values, and the output gate if the layer has one.

        Queries of padding are zeros if `packing.padding` says which positions are padding.
        """
        query, key, value, *gate = self._turned_heads(hidden_states, key_value_states)
        if self.packing is not None and self.packing.padding is not None:
            query = query.masked_fill(self.packing.padding[..., None, None], 0.0)
        return query, key, value, *gate

    def _turned_heads(self, hidden_states: Tensor, key_value_states: Tensor | None) -> tuple[Tensor, ...]:
        raise NotImplementedError


class Attention(TurnedHeads, SelfAttention):
    """megatron-core's self-attention with the rotary embedding of `rotary`, and key/value heads shared by ranks.

    Values have a norm without weights if `value_norm` is its epsilon. With `proj_bias` the output projection has a
    bias, also if other linear layers have none.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *args: Any,
        rotary: Rotary,
        split: HeadSplit,
        value_norm: float | None = None,
        proj_bias: bool = False,
        **kwargs: Any,
    ) -> None:
        if proj_bias:  # attention has no experts, of which biases would need ETP 1
            config = replace(config, add_bias_linear=True, expert_tensor_parallel_size=1)
        super().__init__(config, *args, **kwargs)
        self.rotary, self.split, self.value_norm = rotary, split, value_norm
        self.shared_heads = SharedHeads(split, self.tp_group) if split.copies > 1 else None

    def _turned_heads(self, hidden_states: Tensor, key_value_states: Tensor | None) -> tuple[Tensor, ...]:
        rotary, turns = self.rotary, self.rotation
        gate: list[Tensor] = []
        if self.shared_heads is not None or self.split.gated or self.split.keys_alone:
            query, key, value, *gate = self._split_heads(self.linear_qkv(hidden_states)[0])
        else:
            whole = SelfAttention.get_query_key_value_tensors
            mixed, sizes = whole(self, hidden_states, key_value_states, split_qkv=False)
            if turns is not None and self.q_layernorm is None and not turns.of_axes:
                return rotary.split_and_rotate(mixed, sizes, turns)
            query, key, value = rotary.split(mixed, sizes)
        if self.value_norm is not None:
            value = F.rms_norm(value, value.shape[-1:], eps=self.value_norm)
        if self.q_layernorm is not None:
            query, key = self.q_layernorm(query), self.k_layernorm(key)
        if turns is not None:
            query, key = rotary.rotate(query, turns), rotary.rotate(key, turns)
        return query, key, value, *gate

    def _split_heads(self, mixed: Tensor) -> tuple[Tensor, ...]:
        """Split [S, B, L·rows of a slot] into query [S, B, L·R, D], key and value [S, B, L, D], and gate like query."""
        split = self.split
        rows, keys = split.rows(split.fused[0]), split.rows(*split.fused[1:])
        rows, parts = mixed.unflatten(-1, (split.slots, -1)).split([rows, keys], dim=-1)
        shared = self.shared_heads
        heads = shared.joined(parts) if shared is not None else parts.chunk(2 - split.keys_alone, dim=-1)
        key, value = heads[0], heads[-1]
        query, *gate = rows.reshape(*rows.shape[:2], split.local_heads, -1).split(split.width, dim=-1)
        return query, key, value, *gate


class CoreAttention(nn.Module):
    """Core attention within each sequence: softmax(scale · q·kᵀ)·v, by default with scale 1/√D.

    `sinks` is the number of this rank's query heads if each has a learned score of a key without a value.
    """

    joins_lengths = True  # whether sequences of several lengths may be one call

    def __init__(
        self,
        config: TransformerConfig,
        *_: Any,
        softmax_scale: float | None = None,
        softcap: float | None = None,
        sinks: int | None = None,
        pg_collection: Any = None,
        **__: Any,
    ) -> None:
        super().__init__()
        self.dropout = config.attention_dropout
        self.scale, self.softcap, self.groups = softmax_scale, softcap, pg_collection
        self.sinks = None if sinks is None else nn.Parameter(torch.zeros(sinks, dtype=config.params_dtype))
        if self.sinks is not None:
            set_tensor_model_parallel_attributes(self.sinks, True, 0, 1)

    def own_sinks(self) -> Tensor | None:
        """Return the sinks of the query heads that this rank attends with."""
        return self.sinks

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
        """Return the attention [S, B, N·D] of query [S, B, N, D] to key and value [S, B, G, D].

        Packed sequences lie along the flattened [B·S], row by row, and none crosses the end of a row. One call computes
        all sequences if torch has a kernel for that; otherwise there is one call for each run of equal lengths.
        """
        causal = attn_mask_type in (AttnMaskType.causal, AttnMaskType.padding_causal)
        if packed_seq_params is None:
            out = self._attend(*(x.permute(1, 2, 0, 3) for x in (query, key, value)), causal=causal)
            return out.permute(2, 0, 1, 3).flatten(2)
        if packed_seq_params.cached is not None:
            return packed_seq_params.cached.attend(
                self, query, key, value, scale=self.scale, softcap=self.softcap, sinks=self.sinks
            )
        q, k, v = (in_sequence(packed_seq_params, x) for x in (query, key, value))
        if packed_seq_params.masked:
            with sdpa_kernel(ANY_SHAPE):
                out = attend_in_spans(q, k, v, packed_seq_params.masked, self._attend)
            return in_rows(packed_seq_params, out, rows=query.shape[1])
        drops = self.dropout > 0 and self.training
        if self.joins_lengths and not drops and fits_one_call(q, v):
            out = attend_in_all(q, k, v, packed_seq_params, causal=causal, scale=self.scale)
        else:
            with sdpa_kernel(ANY_SHAPE):
                out = self._attend_run_by_run(q, k, v, packed_seq_params, causal=causal)
        return in_rows(packed_seq_params, out, rows=query.shape[1])

    def _attend_run_by_run(
        self, query: Tensor, key: Tensor, value: Tensor, packing: Packing, *, causal: bool
    ) -> Tensor:
        """Return [T, N·D] from [T, heads, D] each, with one call for each run of equally long sequences."""
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
        """Return [B, N, S, D] from [B, heads, S, D] each."""
        if self.softcap is not None or self.sinks is not None:
            assert mask is not None, "all layers have masks"
            return eager_attention(
                query, key, value, mask=mask, scale=self.scale, softcap=self.softcap, sinks=self.own_sinks()
            )
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

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None, **_: Any) -> Any:
        """Return the sinks, sharded by heads."""
        if self.sinks is None:
            return {}
        groups = {"tp_group": self.groups.tp, "dp_cp_group": metadata["dp_cp_group"]}
        return make_sharded_tensors_for_checkpoint(
            {"sinks": self.sinks}, prefix, {"sinks": 0}, sharded_offsets, **groups
        )


class SharedHeads:
    """Gathers the parts of a rank's keys and values from the ranks that share their heads.

    The backward pass sends gradients back to the ranks that projected the parts, and sums them there.
    """

    def __init__(self, split: HeadSplit, group: dist.ProcessGroup) -> None:
        self.split, self.group = split, group
        self.exchange = split.exchange(group.rank())

    def joined(self, parts: Tensor) -> tuple[Tensor, ...]:
        """Return whole keys and values [S, B, L, D] each of the parts [S, B, L, 2·w], or keys alone of [S, B, L, w]."""
        whole = self._gathered(parts).unflatten(-1, (-1, self.split.part_width))
        return tuple(self._joined(x) for x in whole.unbind(-2))

    def _gathered(self, parts: Tensor) -> Tensor:
        """Return the parts of whole keys and values [L, C, S, B, 2·w] from this rank's parts [S, B, L, 2·w]."""
        sends, receives = self.exchange.sends, list(self.exchange.receives)
        outgoing = [parts[:, :, number] for numbers in sends for number in numbers]
        # A rank of padding alone sends nothing, but still takes part in the exchange of the backward pass.
        sent = torch.stack(outgoing) if outgoing else parts[:, :, :0].movedim(2, 0)
        arrived = all_to_all(self.group, sent, receives, [len(numbers) for numbers in sends])
        return torch.stack([torch.stack([arrived[at] for at in places]) for places in self.exchange.places])

    def _joined(self, parts: Tensor) -> Tensor:
        """Return heads [S, B, L, D] from their parts [L, C, S, B, w]."""
        return parts.permute(2, 3, 0, 1, 4).flatten(-2)[..., : self.split.width]


@cache
def without_padding(attention: type) -> type:
    """Return a subclass of the core attention `attention` whose output is zero for query heads that are padding.

    Such a head has a query of zeros and real keys, so that attention returns the mean of the values. The output layer's
    weights for it are zero, but without this their gradient would not be.
    """

    class AttentionWithoutPadding(attention):  # type: ignore[misc, unused-ignore]
        def __init__(self, *args: Any, split: HeadSplit, rank: int, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            padded = torch.zeros(split.local_heads, split.width, dtype=torch.bool)
            padded[list(split.padded_heads(rank))] = True
            self.register_buffer("padded", padded.flatten(), persistent=False)

        def forward(self, *args: Any, **kwargs: Any) -> Tensor:
            return super().forward(*args, **kwargs).masked_fill(self.padded, 0.0)

    return AttentionWithoutPadding


class LogitAttention(CoreAttention):
    """`CoreAttention` that records the largest logit of each head over training passes, until it is reset.

    torch's kernels do not return logits, so this class recomputes them, in fp32 and for some queries at a time.

    `largest` [N] float64 is 0 where no logit is positive, so that queries of zeros, such as those of padding
    (`Packing.padding`), have no effect. In a recomputed layer, only the pass with gradients is recorded.
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
            logits = largest_logits(query, key, scale=self.scale, causal=causal, mask=mask)
            torch.maximum(self.largest, logits.double(), out=self.largest)
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
        scale: None means 1/√D.
        causal: the last query attends to all keys, and each earlier query to one key less than the next.
        mask: [S, K] of 0 and −∞, added to the logits; or torch's `causal_lower_right`, which is `causal`.
        most: number of logits in memory at a time, but at least those of one query; default: `logits_at_once`.
    """
    _, heads, length, width = query.shape
    groups, keys = key.shape[1:3]
    from torch.nn.attention.bias import CausalBias  # not at the top: it imports torch's compiler, half a second

    if isinstance(mask, CausalBias):
        causal, mask = True, None
    most = most or logits_at_once(on_gpu=query.is_cuda)
    together = max(1, most // (heads * keys))
    samples, step = max(1, together // length), min(together, length)
    largest = query.new_zeros(groups, heads // groups).float()
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
            largest = torch.maximum(largest, logits.amax((0, 3, 4)))
    return largest.flatten() * (width**-0.5 if scale is None else scale)


def _products(query: Tensor, key: Tensor) -> Tensor:
    """Return q·kᵀ in fp32, of query [·, S, D] and key [·, K, D].

    A GPU multiplies fp16 and bf16 directly: their products are exact in fp32, in which it accumulates them.
    """
    if query.is_cuda and query.dtype in (torch.float16, torch.bfloat16):
        return torch.bmm(query, key.mT, out_dtype=torch.float32)
    return query.float() @ key.float().mT
