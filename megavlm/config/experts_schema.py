"""Options of a mixture of experts: language layers with many MLPs, of which a router chooses a few for each token.

Part of the schema (`schema.py`). Options of how experts are trained have flags, with Megatron's names.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal

from megavlm.config.option import EXPERTS, Count, Natural, Needs, NotNegative, Positive, Valid, option

of_experts = partial(option, needs=EXPERTS)


@dataclass(frozen=True)
class ExpertsConfig:
    """A router, routed experts and possibly a shared expert in place of the MLP (Qwen3-MoE, GLM-4.5, DeepSeek-V3)."""

    num_experts: int = option(
        0,
        "Number of experts of a language layer, each of which is an MLP; 0: every layer has one dense MLP.",
        flag="--num-experts",
        valid=Valid("0, or at least 2", lambda value: value == 0 or value >= 2),
    )
    router_topk: Count = of_experts(2, "Number of experts that each token is sent to.")
    ffn_hidden_size: Count = of_experts(None, "Inner width of an expert; default: model.language.ffn_hidden_size.")
    shared_ffn_hidden_size: Count | None = of_experts(
        None, "Inner width of a shared expert, which all tokens take besides routed experts; default: no shared expert."
    )
    shared_gate: bool = of_experts(
        False,
        "Multiply the output of the shared expert by a learned sigmoid gate of the token (Qwen2-MoE).",
    )
    add_bias: bool = of_experts(False, "Add biases to router and experts.")
    own_norms: bool = of_experts(
        False,
        "Normalize inputs and outputs of routed experts and of the shared one; the router normalizes its input, and "
        "scales its channels and the weights of experts (Gemma 4).",
    )
    dense_layers: tuple[Natural, ...] = of_experts(
        (), "Indices (from 0) of language layers that have a dense MLP and no experts; default: no layer."
    )
    router_score_function: Literal["softmax", "sigmoid"] = of_experts(
        "softmax", "How the router scores experts: softmax over experts, or sigmoid of each (DeepSeek-V3, GLM-4.5)."
    )
    router_pre_softmax: bool = of_experts(
        False,
        "Weigh the chosen experts by a softmax over all experts; off: by a softmax over those that are chosen.",
    )
    router_topk_scaling_factor: Positive | None = of_experts(
        None, "Factor of the weights of the chosen experts; default: none (1)."
    )
    router_num_groups: Count | None = of_experts(
        None,
        "Number of groups of experts, of which a token takes experts of model.experts.router_group_topk groups only; "
        "default: no groups.",
    )
    router_group_topk: Count | None = of_experts(
        None,
        "Number of groups whose experts a token may take: those with the largest sums of their best scores; default: "
        "no groups.",
    )
    router_enable_expert_bias: bool = of_experts(
        False,
        "Balance experts by a bias per expert that only their choice uses; each step lowers it for experts with more "
        "tokens than the mean and raises it for others (DeepSeek-V3).",
    )
    router_bias_update_rate: NotNegative = option(
        None,
        "Amount by which each step changes the bias of an expert; default: 0.001, and 0 with given weights.",
        flag="--moe-router-bias-update-rate",
        needs=(
            EXPERTS,
            Needs(
                lambda config: config.model.experts.router_enable_expert_bias,
                "without a bias",
                "add --set model.experts.router_enable_expert_bias=true",
            ),
        ),
    )
    aux_loss_coeff: NotNegative = of_experts(
        0.0,
        "Factor of the loss that balances the load of experts within each sequence, summed over layers; 0: none.",
        flag="--moe-aux-loss-coeff",
    )
    z_loss_coeff: NotNegative = of_experts(
        0.0, "Factor of the loss that keeps the router's scores small (ST-MoE); 0: none.", flag="--moe-z-loss-coeff"
    )
    router_force_load_balancing: bool = of_experts(
        False,
        "Send tokens to all experts equally often, whatever the router says: for measurements of speed only.",
        flag="--moe-router-force-load-balancing",
    )
