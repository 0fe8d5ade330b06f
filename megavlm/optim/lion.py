"""Lion: the sign of an interpolated momentum (Chen et al. 2023), with the interface of `AdamW`.

    g ← g / divisor, where there is one
    u = sign(β₁ m + (1−β₁) g)          θ ← θ (1 − η·λ) − η·u          m ← β₂ m + (1−β₂) g

Every element moves by the learning rate, so that it wants a third to a tenth of AdamW's, and as much more weight decay.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Tensor

from megavlm.optim.adamw import AdamW


class Lion(AdamW):
    """Lion with decoupled weight decay; one moment."""

    moments: ClassVar[tuple[str, ...]] = ("exp_avg",)

    def _apply(
        self,
        group: dict[str, Any],
        values: Sequence[Tensor],
        gradients: Sequence[Tensor],
        moments: Sequence[dict[str, Tensor]],
        divisor: Tensor | None,
    ) -> None:
        beta1, beta2 = group["betas"]
        for value, gradient, kept in zip(values, gradients, moments, strict=True):
            momentum = kept["exp_avg"]
            if divisor is not None:
                gradient.div_(divisor)
            update = momentum.lerp(gradient, 1 - beta1).sign_()
            value.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"])
            momentum.lerp_(gradient, 1 - beta2)
