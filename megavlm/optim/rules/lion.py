"""Lion: the sign of an interpolated momentum (Chen et al. 2023).

    g ← g / divisor, where there is one
    u = sign(β₁ m + (1−β₁) g)          θ ← θ (1 − η·λ) − η·u          m ← β₂ m + (1−β₂) g

Every element moves by the learning rate, so that it wants a third to a tenth of AdamW's, and as much more weight decay.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from megavlm.config import update_rules
from megavlm.config.schema import OptimizerConfig
from megavlm.optim.elementwise import ElementwiseRule
from megavlm.optim.stores import Shard


def _group(options: OptimizerConfig) -> dict[str, Any]:
    return {"betas": (options.lion_beta1, options.lion_beta2)}


def _update(shards: Sequence[Shard], group: Mapping[str, Any], divisor: Tensor | None) -> None:
    beta1, beta2 = group["betas"]
    for shard in shards:
        value, gradient, momentum = shard.value, shard.gradient, shard.state["exp_avg"]
        if divisor is not None:
            gradient.div_(divisor)
        update = momentum.lerp(gradient, 1 - beta1).sign_()
        value.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"])
        momentum.lerp_(gradient, 1 - beta2)


LION = ElementwiseRule(update_rules.LION.state, _group, _update)
