"""`GatedDeltaNet`: linear attention that replaces a layer's self-attention (Yang et al. 2024; Qwen3-Next, Qwen3.5).

Heads are sharded over tensor-parallel ranks as in attention: a key head serves several value heads, and ranks may share
it (`arch/tensor_split.py`). Context-parallel ranks exchange heads, too, once before the convolution and once after the
rule. In between a rank has whole rows of some heads, so that a state passes along a whole row and there is no scan over
ranks. The exchange moves 2·(V + K·G/N) + 2 numbers of a token and value head. A scan would move K·V numbers of a state
for each rank and head, and compute one rank after the other.

Names of parameters are megatron-core's (`ssm/gated_delta_net.py`), whose own module refuses packed rows.

Legend: S positions, B samples, N local value heads, G local key heads (slots), R value heads of a key head, K width of
a key, V of a value; C context-parallel ranks, E of them that exchange heads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import all_to_all, copy_to_tensor_model_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint, sharded_state_dict_default
from torch import Tensor, nn

from megavlm.arch.mixers import CHUNK
from megavlm.arch.tensor_split import DeltaSplit
from megavlm.inputs.batch import Continuation
from megavlm.model.attention import SharedHeads
from megavlm.model.context_attention import gathered, heads_for_ranks, heads_of_ranks, own_runs, rows_of_ranks
from megavlm.model.delta_rule import (
    Sequences,
    causal_convolution,
    chunks_of,
    convolved,
    delta_rule_by_chunks,
    gated_delta_rule,
)
from megavlm.model.norm import rms_norm
from megavlm.model.packing import Packing
from megavlm.parallel.groups import Groups


@dataclass(frozen=True)
class DeltaHeads:
    """Inputs of the convolution and of the rule, for some heads.

    `mixed` [S, B, channels] holds the values of all heads, then the queries, then the keys. `gates` [S, B, N, 2] holds
    β and decay before their activations, `rates` [N, 2] the parameters A_log and dt_bias. `weight` [channels, W] is
    the convolution's.
    """

    mixed: Tensor
    gates: Tensor
    weight: Tensor
    rates: Tensor


class GatedDeltaNet(MegatronModule):
    """Linear attention of hidden states [S(/TP), B, H], which returns the same shape."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        *,
        split: DeltaSplit,
        taps: int,
        groups: Groups,
        column_linear: Any,
        row_linear: Any,
        **_: Any,
    ) -> None:
        super().__init__(config)
        self.split, self.groups = split, groups
        heads, tp = split.heads, groups.dims.tp
        common = {"config": config, "bias": False, "is_expert": False, "skip_bias_add": False, "tp_group": groups.tp}
        self.in_proj = build_module(
            column_linear,
            config.hidden_size,
            split.local_rows * tp,
            init_method=config.init_method,
            gather_output=False,
            tp_comm_buffer_name="fc1",
            **common,
        )
        self.out_proj = build_module(
            row_linear,
            heads.local_heads * split.width * tp,
            config.hidden_size,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            tp_comm_buffer_name="fc2",
            **common,
        )
        dtype, channels = config.params_dtype, heads.slots * heads.rows(*split.convolved)
        self.conv1d = Taps(channels, taps, dtype)
        self.A_log = nn.Parameter(torch.zeros(heads.local_heads, dtype=dtype))
        self.dt_bias = nn.Parameter(torch.zeros(heads.local_heads, dtype=dtype))
        for param in (self.conv1d.weight, self.A_log, self.dt_bias):
            set_tensor_model_parallel_attributes(param, True, 0, 1)
        self.out_norm = GatedNorm(split.width, config.layernorm_epsilon, groups, dtype)
        self.shared = SharedHeads(heads, groups.tp) if heads.copies > 1 else None

    def forward(
        self, hidden_states: Tensor, *args: Any, packed_seq_params: Packing | None = None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        """Return the layer's output, and no bias, as megatron-core's layer expects."""
        packing = packed_seq_params
        assert packing is not None
        heads, gate = self._projected(hidden_states)
        if packing.cached is not None:
            out = self._continued(heads, packing.cached.rows)
        else:
            assert packing.sequences is not None, "the bounds of sequences"
            heads, back = self._exchanged(heads)
            out = back(self._attended(heads, packing.sequences))
        return self.out_proj(self.out_norm(out, gate).flatten(2))[0], None

    @property
    def blocks(self) -> dict[str, int]:
        """Return the rows of each of Transformers' linear layers in one slot of the fused projection."""
        split, heads = self.split, self.split.heads
        rows = heads.rows(*split.convolved), heads.queries * split.width, heads.queries, heads.queries
        return dict(zip(("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"), rows, strict=True))

    def _projected(self, hidden: Tensor) -> tuple[DeltaHeads, Tensor]:
        """Return the projected heads of this rank's tokens, and the gate of their output, [S/C, B, N, V]."""
        split, heads = self.split, self.split.heads
        rows = self.in_proj(hidden)[0][..., : heads.slots * heads.rows(*split.projected)]
        slots = rows.unflatten(-1, (heads.slots, -1))
        mixed, gate, beta, decay = slots.split([*self.blocks.values()], dim=-1)
        gates = torch.stack([beta.flatten(2), decay.flatten(2)], dim=-1)
        weight = self.conv1d().unflatten(0, (heads.slots, -1)).movedim(-1, 0)[:, None]  # [W, 1, G, rows]
        found = DeltaHeads(
            self._joined(mixed), gates, self._joined(weight)[:, 0].mT, torch.stack([self.A_log, self.dt_bias], dim=-1)
        )
        return found, gate.reshape(*gate.shape[:2], heads.local_heads, split.width)

    def _joined(self, slots: Tensor) -> Tensor:
        """Map [S, B, G, rows] to [S, B, channels]: all values, then all queries, then all keys, each whole."""
        heads, width = self.split.heads, self.split.width
        values, parts = slots.split([heads.queries * width, 2 * heads.part_width], dim=-1)
        query, key = parts.chunk(2, dim=-1) if self.shared is None else self.shared.joined(parts)
        return torch.cat([each.flatten(2) for each in (values, query, key)], dim=-1)

    def _exchanged(self, heads: DeltaHeads) -> tuple[DeltaHeads, Callable[[Tensor], Tensor]]:
        """Return some heads of whole rows, and the function that exchanges back: it takes the output of these heads
        [S, B, N/E, V] and returns that of all heads for this rank's tokens, [S/C, B, N, V].
        """
        context = self.groups.context
        ranks, rank = context.split.heads, context.heads.rank()
        if self.groups.dims.cp == 1:
            return heads, lambda out: out
        sent, sizes = heads_for_ranks([*self._head_by_head(heads.mixed), heads.gates], ranks)
        parts = rows_of_ranks(all_to_all(context.heads, sent))
        if context.split.groups > 1:
            (parts,) = gathered([parts[:, :, None]], context.keys)
            parts = parts[:, :, 0]
        mixed, gates = parts.split([sum(sizes[:3]), sizes[3]], dim=-1)
        weight, _ = heads_for_ranks(self._head_by_head(heads.weight.mT[:, None]), ranks)
        own = DeltaHeads(
            mixed,
            gates.unflatten(-1, (-1, 2)),
            weight[rank, :, 0].mT,
            heads.rates.unflatten(0, (ranks, -1))[rank],
        )

        def back(out: Tensor) -> Tensor:
            if context.split.groups > 1:
                out = own_runs(out, context.split.groups, context.keys.rank())
            parts = all_to_all(context.heads, out.unflatten(0, (ranks, -1)))  # [E, S/C, B, N/E, V]
            return heads_of_ranks(parts).unflatten(-1, (-1, self.split.width))

        return own, back

    def _head_by_head(self, mixed: Tensor) -> list[Tensor]:
        """Split […, channels] into values […, N, V], queries and keys […, G, K]."""
        heads, width = self.split.heads, self.split.width
        values, keys = heads.local_heads * width, heads.slots * heads.width
        parts = mixed.split([values, keys, keys], dim=-1)
        return [x.unflatten(-1, (-1, each)) for x, each in zip(parts, (width, heads.width, heads.width), strict=True)]

    def _attended(self, heads: DeltaHeads, sequences: Sequences) -> Tensor:
        """Return the rule's output of whole rows, [S, B, N/E, V]."""
        rows = heads.mixed.shape[1]
        mixed = causal_convolution(_in_a_row(heads.mixed), heads.weight, sequences)
        out = gated_delta_rule(*self._inputs(mixed, _in_a_row(heads.gates), heads.rates), sequences)
        return out.unflatten(0, (rows, -1)).transpose(0, 1)

    def _inputs(self, mixed: Tensor, gates: Tensor, rates: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return queries, keys, values, decay and β of each value head, given [T, channels], [T, N, 2] and [N, 2]."""
        count, width, key_width = len(rates), self.split.width, self.split.heads.width
        keys = (mixed.shape[-1] - count * width) // 2
        values, query, key = mixed.split([count * width, keys, keys], dim=-1)
        query, key = (
            x.unflatten(-1, (-1, key_width)).repeat_interleave(count * key_width // keys, dim=1) for x in (query, key)
        )
        beta, step = gates.unbind(-1)
        log_a, bias = rates.float().unbind(-1)
        decay = -log_a.exp() * F.softplus(step.float() + bias)
        return query, key, values.unflatten(-1, (-1, width)), decay, beta.sigmoid()

    def _continued(self, heads: DeltaHeads, rows: Continuation) -> Tensor:
        """Return the output of new tokens, [S, B, N, V], which continue from the cached states of their rows.

        Padding after the last token of a row does not change its state.
        """
        length, count, _ = heads.mixed.shape
        taps = heads.weight.shape[1]
        new = heads.mixed.transpose(0, 1)  # [B, S, channels]
        before, state = rows.cache.state(self) or (new.new_zeros(count, taps - 1, new.shape[-1]), None)
        inputs = torch.cat([before, new], dim=1)
        last = rows.last[:, None] + 1 + torch.arange(taps - 1, device=new.device)
        kept = inputs.gather(1, last[..., None].expand(-1, -1, new.shape[-1]))
        places = torch.arange(inputs.shape[1], device=new.device).repeat(count)
        mixed = F.silu(convolved(inputs.flatten(0, 1), heads.weight, places)).unflatten(0, (count, -1))
        mixed = mixed[:, taps - 1 :].flatten(0, 1)
        query, key, value, decay, beta = self._inputs(mixed, _in_a_row(heads.gates), heads.rates)
        real = (torch.arange(length, device=new.device) <= rows.last[:, None]).flatten()[:, None]
        chunks = chunks_of(range(0, count * length + 1, length), new.device, size=min(length, CHUNK))
        out, state = delta_rule_by_chunks(query, key, value, decay * real, beta * real, chunks, state)
        rows.cache.keep_state(self, (kept, state))
        return out.unflatten(0, (count, -1)).transpose(0, 1)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None, tp_group: Any = None
    ) -> Any:
        linears = ("in_proj.", "out_proj.")
        own = {name: param for name, param in self.named_parameters() if not name.startswith(linears)}
        state = make_sharded_tensors_for_checkpoint(
            own,
            prefix,
            {"conv1d.weight": 0, "A_log": 0, "dt_bias": 0},
            sharded_offsets,
            tp_group=self.groups.tp,
            dp_cp_group=metadata["dp_cp_group"],
        )
        for name in ("in_proj", "out_proj"):
            linear = getattr(self, name)
            state |= sharded_state_dict_default(
                linear, f"{prefix}{name}.", sharded_offsets, metadata, tp_group=self.groups.tp
            )
        return state


class Taps(nn.Module):
    """Holder of the weight [channels, W] of a causal convolution; `forward` returns it."""

    def __init__(self, channels: int, taps: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(channels, taps, dtype=dtype))

    def forward(self) -> Tensor:
        return self.weight


class GatedNorm(nn.Module):
    """RMS norm of each head with a gate: x / rms(x) · weight · silu(gate), [S, B, N, V]."""

    def __init__(self, width: int, epsilon: float, groups: Groups, dtype: torch.dtype) -> None:
        super().__init__()
        self.epsilon, self.tp = epsilon, groups.tp
        self.weight = nn.Parameter(torch.ones(width, dtype=dtype))

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        # The gradient is the sum over the heads of all tensor-parallel ranks.
        weight = copy_to_tensor_model_parallel_region(self.weight, group=self.tp)
        return (rms_norm(x, weight, self.epsilon, offset=0) * F.silu(gate.float())).to(x.dtype)


def _in_a_row(x: Tensor) -> Tensor:
    """[S, B, …] → [T, …], row by row."""
    return x.transpose(0, 1).flatten(0, 1)
