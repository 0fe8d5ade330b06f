"""Router of a mixture of experts, and the losses that balance experts.

For each row r of a step, with n_r tokens and m_r terms of the loss (trained tokens; for losses of embeddings pairs or
queries), and for each layer with E experts of which a token takes k:

    share     f_i = E / (k·n_r) · (tokens of the row that take expert i)       1 for each expert if the load is even
    score     P_i = 1 / n_r · (sum of the tokens' scores of expert i)          scores of a token sum to 1
    balance   L_r = Σ_i f_i · P_i                                              at least about 1, and 1 if all is even
    z         Z_r = 1 / n_r · Σ_t (log Σ_i exp logit_ti)²                      (ST-MoE; Zoph et al. 2022)

The step's loss gets Σ_layers Σ_r m_r · (aux_loss_coeff · L_r + z_loss_coeff · Z_r) / Σ_r m_r: each row counts as much
as its terms do in the loss. L_r is that of Switch Transformer (Fedus et al. 2021) for one sequence, as
DeepSeek-V3 has it. A row is the same in every layout and micro-batch, so the loss is, too; padding is not counted.

Legend: S positions of a row on this rank (S/(CP·TP) of it), B rows, T = S·B tokens, H width, E experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.moe_utils import (
    MoEAuxLossAutoScaler,
    router_gating_linear,
    topk_routing_with_score_function,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from megavlm.config.schema import ExpertsConfig


@dataclass(frozen=True, eq=False)
class RoutedRows:
    """Tokens and loss terms of a micro-batch's rows, for the balance losses. This rank has a part of each row."""

    counted: Tensor  # [S, B] float32: 1 for tokens, 0 for padding
    tokens: Tensor  # [B] float32: tokens of the whole row, at least 1
    terms: Tensor  # [B] float32: of the loss, such as trained tokens


class Router(MegatronModule):
    """Router of one layer. It returns weights [T, E], 0 for experts not chosen, and the choice of each token [T, E].

    It computes in fp32. `tally` sums, over the micro-batches of a step, this rank's share of the load of each expert,
    and of Σ_r m_r·L_r and Σ_r m_r·Z_r.
    """

    rows: RoutedRows | None = None  # of the micro-batch that runs; megatron-core's layer passes on hidden states alone
    replay: Any = None  # chooses experts by the scores with megatron-core's `get_replay_topk`; None: the best ones
    expert_bias: Tensor | None  # [E] float32
    tally: Tensor  # [E + 2] float64

    def __init__(
        self, config: TransformerConfig, pg_collection: ProcessGroupCollection, *, experts: ExpertsConfig
    ) -> None:
        super().__init__(config)
        self.experts, self.group, self.tp_group = experts, pg_collection.tp_cp, pg_collection.tp
        self.weight = nn.Parameter(torch.empty(experts.num_experts, config.hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.bias = self.input_scale = self.expert_scale = None
        if experts.add_bias:
            self.bias = nn.Parameter(torch.zeros(experts.num_experts, dtype=config.params_dtype))
            self.bias.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        if experts.own_norms:
            self.input_scale = nn.Parameter(torch.ones(config.hidden_size, dtype=config.params_dtype))
            self.expert_scale = nn.Parameter(torch.ones(experts.num_experts, dtype=config.params_dtype))
            for scale in (self.input_scale, self.expert_scale):
                scale.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.register_buffer(
            "expert_bias", torch.zeros(experts.num_experts) if experts.router_enable_expert_bias else None
        )
        self.register_buffer("tally", torch.zeros(experts.num_experts + 2, dtype=torch.float64), persistent=False)
        self.number = 0  # of the layer, from 0

    def set_layer_number(self, number: int) -> None:
        """Store the number of the layer; megatron-core counts layers from 1."""
        self.number = number - 1

    def forward(self, hidden: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the weights and the choice of experts for hidden states [S, B, H]."""
        experts = self.experts
        if self.input_scale is not None:
            normed = F.rms_norm(hidden, hidden.shape[-1:], eps=self.config.layernorm_epsilon)
            hidden = normed * self.input_scale * hidden.shape[-1] ** -0.5
        logits = router_gating_linear(hidden.contiguous(), self.weight, self.bias, torch.float32)
        if experts.router_force_load_balancing:
            logits = logits + _in_turn(logits, experts.router_topk)
        flat = logits.flatten(0, 1)
        weights, chosen = topk_routing_with_score_function(
            flat,
            experts.router_topk,
            use_pre_softmax=experts.router_pre_softmax,
            num_groups=experts.router_num_groups,
            group_topk=experts.router_group_topk,
            scaling_factor=experts.router_topk_scaling_factor,
            score_function=experts.router_score_function,
            expert_bias=self.expert_bias,
            router_replay=self.replay,
        )
        if self.expert_scale is not None:
            weights = weights * self.expert_scale
        # Not in evaluations, nor in the first of the two passes of a layer that is recomputed or of a gradient cache.
        if self.training and torch.is_grad_enabled() and self.rows is not None:
            weights = self._balanced(weights, logits, chosen.view(logits.shape), self.rows)
        return weights, chosen

    def _balanced(self, weights: Tensor, logits: Tensor, chosen: Tensor, rows: RoutedRows) -> Tensor:
        """Return the weights, with the balance losses attached to their gradient, and add to the tally."""
        counted = rows.counted[..., None]
        load = (chosen * counted).sum(0)  # [B, E]
        losses = torch.zeros(2, device=logits.device)
        if self.experts.aux_loss_coeff or self.experts.z_loss_coeff:
            row_losses = torch.stack([self._balance(logits, load, rows), _z(logits, rows)])
            losses = (row_losses * rows.terms).sum(-1)
            coefficients = losses.new_tensor([self.experts.aux_loss_coeff, self.experts.z_loss_coeff])
            weights = MoEAuxLossAutoScaler.apply(weights, (losses * coefficients).sum())
        self.tally += torch.cat([load.sum(0), losses.detach()])
        return weights

    def _balance(self, logits: Tensor, load: Tensor, rows: RoutedRows) -> Tensor:
        """Return this rank's share of L_r of each row, [B], from f of whole rows and P of this rank's tokens."""
        whole = load.clone()
        if self.group.size() > 1:
            dist.all_reduce(whole, group=self.group)
        share = whole * (self.experts.num_experts / self.experts.router_topk) / rows.tokens[:, None]
        if self.experts.router_score_function == "softmax":
            scores = logits.softmax(-1)
        else:
            scores = logits.sigmoid()
            scores = scores / scores.sum(-1, keepdim=True)
        mean = (scores * rows.counted[..., None]).sum(0) / rows.tokens[:, None]
        return (share * mean).sum(-1)

    @torch.no_grad()
    def update_bias(self, load: Tensor) -> None:
        """Lower the bias of experts whose load [E] is above the mean, and raise the bias of those below it.

        (Wang et al. 2024, "Auxiliary-Loss-Free Load Balancing".)
        """
        if self.expert_bias is not None:
            self.expert_bias += self.experts.router_bias_update_rate * torch.sign(load.mean() - load)


def _z(logits: Tensor, rows: RoutedRows) -> Tensor:
    """Return this rank's share of Z_r of each row, [B]."""
    return (logits.logsumexp(-1).square() * rows.counted).sum(0) / rows.tokens


def _in_turn(logits: Tensor, topk: int) -> Tensor:
    """Return the addend of the logits [S, B, E] by which tokens take all experts in turn."""
    count, experts = logits[..., 0].numel(), logits.shape[-1]
    chosen = torch.arange(count * topk, device=logits.device).view(count, topk) % experts
    return torch.zeros(count, experts, device=logits.device).scatter_(1, chosen, 1e3).view(logits.shape)


def routers_of(chunks: Any) -> Iterator[Router]:
    """Yield the routers of chunks, which may be wrapped for data parallelism."""
    for chunk in chunks:
        for module in chunk.modules():
            if isinstance(module, Router):
                yield module
