"""AdamW in plain torch (Loshchilov & Hutter 2019).

g ← g / divisor, where there is one
m ← β₁ m + (1−β₁) g          v ← β₂ v + (1−β₂) g²
θ ← θ (1 − lr·λ) − lr · m̂ / (√v̂ + ε),   m̂ = m/(1−β₁ᵗ), v̂ = v/(1−β₂ᵗ)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megavlm.config import update_rules
from megavlm.config.schema import OptimizerConfig
from megavlm.optim.elementwise import ElementwiseRule
from megavlm.optim.stores import Shard


def _group(options: OptimizerConfig) -> dict[str, Any]:
    # `bias_correction` is what the fused optimizers of other programs read in a group that they resume.
    return {"bias_correction": True, "betas": (options.adam_beta1, options.adam_beta2), "eps": options.adam_eps}


def _update(shards: Sequence[Shard], group: Mapping[str, Any], divisor: Tensor | None) -> None:
    beta1, beta2 = group["betas"]
    step = torch.full((), float(group["step"]), device=shards[0].value.device)
    # One pass over memory. The same update as _foreach operations makes seven, and allocates a denominator.
    torch._fused_adamw_(
        [shard.value for shard in shards],
        [shard.gradient for shard in shards],
        [shard.state["exp_avg"] for shard in shards],
        [shard.state["exp_avg_sq"] for shard in shards],
        [],  # AMSGrad's maxima
        [step] * len(shards),
        lr=group["lr"],
        beta1=beta1,
        beta2=beta2,
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        amsgrad=False,
        maximize=False,
        grad_scale=divisor,
    )


ADAMW = ElementwiseRule(update_rules.ADAMW.state, _group, _update)
