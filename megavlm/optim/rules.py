"""Compute the updates of the optimizer rules; `config/optimizer_schema.py` declares the rules without torch.

AdamW (Loshchilov & Hutter 2019), with g divided by a divisor first, where there is one, as in Lion:

    m ← β₁ m + (1−β₁) g          v ← β₂ v + (1−β₂) g²
    θ ← θ (1 − lr·λ) − lr · m̂ / (√v̂ + ε),   m̂ = m/(1−β₁ᵗ), v̂ = v/(1−β₂ᵗ)

Lion, the sign of an interpolated momentum (Chen et al. 2023). Every element moves by the learning rate, so that Lion
needs a third to a tenth of AdamW's rate, and three to ten times its weight decay:

    u = sign(β₁ m + (1−β₁) g)          θ ← θ (1 − η·λ) − η·u          m ← β₂ m + (1−β₂) g

Muon, momentum of matrices, made orthogonal (Jordan et al. 2024; at scale: Liu et al. 2025). The factor gives an update
the root mean square of AdamW's, so that learning rates and weight decay may be kept:

    M ← μM + G          U = G + μM  (Nesterov)          W ← (1 − ηλ) W − η · 0.2·√max(rows, columns) · orthogonal(U)

The nearest orthogonal matrix, nearly: with X = U S Vᵀ, X ← aX + b(XXᵀ)X + c(XXᵀ)²X turns each singular value s into
as + bs³ + cs⁵. The coefficients let small ones grow fast, and leave those above about 0.01 of the norm between 0.7 and
1.2 after five steps (Newton-Schulz iterations): UVᵀ but for that spread, which training does not notice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from megavlm.config import optimizer_schema
from megavlm.config.optimizer_schema import RULES
from megavlm.config.schema import OptimizerConfig
from megavlm.model.specs import DTYPES
from megavlm.optim.elementwise import ElementwiseRule
from megavlm.optim.stores import Shard


def _adamw_group(options: OptimizerConfig) -> dict[str, Any]:
    # The fused optimizers of other programs read `bias_correction` in a parameter group on resume.
    return {"bias_correction": True, "betas": (options.adam_beta1, options.adam_beta2), "eps": options.adam_eps}


def _adamw_update(shards: Sequence[Shard], group: Mapping[str, Any], divisor: Tensor | None) -> None:
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


ADAMW = ElementwiseRule(optimizer_schema.ADAMW.state, _adamw_group, _adamw_update)


def _lion_group(options: OptimizerConfig) -> dict[str, Any]:
    return {"betas": (options.lion_beta1, options.lion_beta2)}


def _lion_update(shards: Sequence[Shard], group: Mapping[str, Any], divisor: Tensor | None) -> None:
    beta1, beta2 = group["betas"]
    for shard in shards:
        value, gradient, momentum = shard.value, shard.gradient, shard.state["exp_avg"]
        if divisor is not None:
            gradient.div_(divisor)
        update = momentum.lerp(gradient, 1 - beta1).sign_()
        value.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"])
        momentum.lerp_(gradient, 1 - beta2)


LION = ElementwiseRule(optimizer_schema.LION.state, _lion_group, _lion_update)


MATCHES_ADAMW = 0.2  # root mean square of AdamW's updates (Liu et al. 2025)
_A, _B, _C = 3.4445, -4.7750, 2.0315
_EPSILON = 1e-7  # added to the norm: zeros stay zeros


@dataclass(frozen=True)
class Muon:
    """Muon rule for whole matrices, with decoupled weight decay: `steps` Newton-Schulz iterations, computed in `dtype`.

    Other matrix rules have the same methods and `dtype`, the type of assembled matrices and of sent pieces.
    """

    momentum: float
    steps: int
    dtype: torch.dtype

    @classmethod
    def of(cls, options: OptimizerConfig) -> Self:
        """Return the rule with a run's options."""
        return cls(options.muon_momentum, options.muon_num_ns_steps, DTYPES[options.muon_precision])

    @property
    def state(self) -> tuple[str, ...]:
        """Return the names of the state tensors, with a number per element, initially zero."""
        return optimizer_schema.MUON.state

    def accumulate(self, gradient: Tensor, state: Mapping[str, Tensor]) -> None:
        """Update the momentum with a part of a gradient, and overwrite the gradient with this part of U."""
        momentum = state["momentum"]
        momentum.mul_(self.momentum).add_(gradient)
        gradient.add_(momentum, alpha=self.momentum)

    def update_of(self, matrices: Tensor) -> Tensor:
        """Return the updates, without the learning rate, of matrices U [B, rows, columns]."""
        return orthogonalized(matrices, steps=self.steps).mul_(MATCHES_ADAMW * math.sqrt(max(matrices.shape[1:])))


def orthogonalized(matrices: Tensor, *, steps: int) -> Tensor:
    """Orthogonalise matrices [B, rows, columns], nearly: singular values become about 1; the type stays.

    Rows and columns of zeros stay zero and do not change the others.
    """
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices  # products of the shorter side are cheaper
    norm = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True, dtype=torch.promote_types(x.dtype, torch.float32))
    x = (x / (norm + _EPSILON)).to(x.dtype)
    for _ in range(steps):
        square = torch.bmm(x, x.mT)
        polynomial = torch.baddbmm(square, square, square, beta=_B, alpha=_C)
        x = torch.baddbmm(x, polynomial, x, beta=_A)
    return x.mT if tall else x


ELEMENTWISE: Mapping[str, ElementwiseRule] = {"adamw": ADAMW, "lion": LION}
OF_MATRICES: Mapping[str, Callable[[OptimizerConfig], Muon]] = {"muon": Muon.of}

assert {rule.name: rule.others is None for rule in RULES.values()} == {
    **dict.fromkeys(ELEMENTWISE, True),
    **dict.fromkeys(OF_MATRICES, False),
}, "each rule that is declared has a computation of its kind"
