"""`LatentAttention`: multi-head latent attention (MLA; DeepSeek-V2, DeepSeek-AI 2024; Kimi K2).

Keys and values of all heads are projected from one latent per token; all heads also share a part of the key that
rotates. Queries are projected from hidden states or from a latent of their own. Names of parameters are those of
megatron-core's `MLASelfAttention`, but only its base class is used here: `MLASelfAttention` takes two classes of linear
layers alone, counts positions from the beginning of a row and not of a sample, and gathers hidden states over
tensor-parallel ranks to project latents from them, which it gathers again.

Here the projections to latents are replicated. Each rank projects its own part of the sequence, and latents are
gathered: 2,112 channels of a token in place of 7,168 in Kimi K2. Heads are sharded as those of other attention.
Context-parallel ranks gather latents if that moves less than exchanging heads (`gathering_latents_moves_less`).

Legend: S positions (of this rank), B samples, H hidden width, N local heads, L width of a latent, R channels that
rotate and D all channels of a query or key, V channels of a value; C context-parallel ranks.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.attention import Attention as MegatronAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from megavlm.arch.tensor_split import language_split
from megavlm.config.schema import LanguageConfig
from megavlm.model.attention import TurnedHeads
from megavlm.model.context_attention import gathered
from megavlm.model.layer_modules import LayerModules
from megavlm.model.norm import Norm
from megavlm.parallel.groups import Groups

EPSILON = 1e-6  # of the norms of latents, whatever the epsilon of other norms (DeepSeek-V3)


class LatentAttention(TurnedHeads, MegatronAttention):
    """Attention with keys and values projected from latents: [S(/TP), B, H] → [S(/TP), B, H]."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: Any,
        layer_number: int,
        *,
        language: LanguageConfig,
        modules: LayerModules,
        groups: Groups,
        **kwargs: Any,
    ) -> None:
        # megatron-core's class takes the width of a head for the output's projection alone.
        own = replace(config, kv_channels=language.v_head_dim)
        super().__init__(own, submodules, layer_number, AttnMaskType.causal, "self", **kwargs)
        split = language_split(language, groups.dims.tp)
        assert split.latent is not None
        assert language.kv_lora_rank is not None
        self.heads, self.split, self.rotary, self.groups = split.latent, split, modules.rotary, groups
        self.gathers = groups.dims.cp > 1 and groups.context.split.heads == 1
        hidden, rank = config.hidden_size, language.kv_lora_rank

        def up(name: str, inputs: int, layer_config: TransformerConfig) -> Any:
            return build_module(
                modules.column_linear_alone,
                inputs,
                split.local_heads * split.latent.rows[name] * groups.dims.tp,  # type: ignore[union-attr]
                config=layer_config,
                init_method=config.init_method,
                gather_output=False,
                bias=False,
                skip_bias_add=False,
                is_expert=False,
                tp_comm_buffer_name="fc1",
                tp_group=groups.tp,
            )

        self.q_lora_rank = language.q_lora_rank
        self.q_layernorm: Any = None
        self.k_layernorm = None  # megatron-core asks for it
        if self.q_lora_rank is None:
            self.linear_q_proj = up("linear_q_proj", hidden, config)
        else:
            self.linear_q_down_proj = WholeLinear(hidden, self.q_lora_rank, config, groups)
            self.q_layernorm = Norm(config, self.q_lora_rank, EPSILON, normalization="RMSNorm")
            if not config.sequence_parallel:  # each rank has the whole gradient: megatron-core must not sum it
                self.q_layernorm.weight.average_gradients_across_tp_domain = True
            self.linear_q_up_proj = up("linear_q_up_proj", self.q_lora_rank, config)
        self.linear_kv_down_proj = WholeLinear(hidden, rank + self.heads.turning, config, groups)
        self.kv_layernorm = Norm(config, rank, EPSILON, normalization="RMSNorm")
        # This projection reads latents of whole rows if they have been gathered.
        reads = replace(config, sequence_parallel=config.sequence_parallel and not self.gathers)
        self.linear_kv_up_proj = up("linear_kv_up_proj", rank, reads)

    @property
    def projections(self) -> dict[str, Any]:
        """Return the linear layers that are sharded by heads, for queries and for keys with values, by their names in
        Transformers.
        """
        queries = {"q_proj": "linear_q_proj"} if self.q_lora_rank is None else {"q_b_proj": "linear_q_up_proj"}
        return {name: getattr(self, own) for name, own in {**queries, "kv_b_proj": "linear_kv_up_proj"}.items()}

    @property
    def whole_projections(self) -> dict[str, Any]:
        """Return the linear layers that are whole on every rank, by their names in Transformers."""
        queries = {} if self.q_lora_rank is None else {"q_a_proj": self.linear_q_down_proj}
        return {**queries, "kv_a_proj_with_mqa": self.linear_kv_down_proj}

    def _turned_heads(self, hidden_states: Tensor, key_value_states: Tensor | None) -> tuple[Tensor, ...]:
        """Return query and key [S, B, N, D] and value [S, B, N, V]; if latents are gathered, key and value are
        [S·C, B, N, ·].
        """
        heads = self.heads
        if self.q_lora_rank is None:
            rows = self.linear_q_proj(hidden_states)[0]
        else:
            rows = self.linear_q_up_proj(self.q_layernorm(self.linear_q_down_proj(hidden_states)))[0]
        query = rows.unflatten(-1, (self.split.local_heads, -1))
        latent, turning = self.linear_kv_down_proj(hidden_states).split(
            [self.kv_layernorm.shape[0], heads.turning], dim=-1
        )
        latent, turning = self.kv_layernorm(latent), self._shared(turning)[:, :, None]
        if self.rotation is not None:
            still, turned = query.split([heads.still, heads.turning], dim=-1)
            query = torch.cat([still, self.rotary.rotate(turned, self.rotation)], dim=-1)
            turning = self.rotary.rotate(turning, self.rotation)
        if self.gathers:
            latent, turning = self._gathered(latent, turning)
        rows = self.linear_kv_up_proj(latent)[0].unflatten(-1, (self.split.local_heads, -1))
        still, value = rows.split([heads.still, heads.value], dim=-1)
        key = torch.cat([still, turning.expand(-1, -1, self.split.local_heads, -1)], dim=-1)
        return query, key, value.contiguous()

    def _shared(self, turning: Tensor) -> Tensor:
        """Return the rotary channels of keys of all positions, [S, B, R], from this rank's part [S(/TP), B, R]. All
        heads share them, so the gradient is summed over tensor-parallel ranks.
        """
        if self.config.sequence_parallel:
            return gather_from_sequence_parallel_region(turning, group=self.groups.tp)
        return copy_to_tensor_model_parallel_region(turning, group=self.groups.tp)

    def _gathered(self, latent: Tensor, turning: Tensor) -> tuple[Tensor, Tensor]:
        """Return latents and rotated parts of keys of whole rows, [S·C, B, L] and [S·C, B, 1, R]."""
        if self.config.sequence_parallel:  # the projection that reads it sums its gradient over these ranks
            latent = gather_from_sequence_parallel_region(
                latent, tensor_parallel_output_grad=False, group=self.groups.tp
            )
        if self.packing is not None and self.packing.cached is not None:  # answers are generated from whole rows
            return latent, turning
        latent, turning = gathered((latent[:, :, None], turning), self.groups.context.keys)
        return latent[:, :, 0], turning


class WholeLinear(nn.Module):
    """A linear layer without bias, whole on every tensor-parallel rank: [S(/TP), B, inputs] → [S(/TP), B, outputs]."""

    def __init__(self, inputs: int, outputs: int, config: TransformerConfig, groups: Groups) -> None:
        super().__init__()
        self.config, self.tp_group = config, groups.tp
        self.weight = nn.Parameter(torch.zeros(outputs, inputs, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)
