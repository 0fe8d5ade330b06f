"""AdamW with the interface of the fused GPU optimizers, in plain torch.

    m ← β₁ m + (1−β₁) g          v ← β₂ v + (1−β₂) g²
    θ ← θ (1 − lr·λ) − lr · m̂ / (√v̂ + ε),   m̂ = m/(1−β₁ᵗ), v̂ = v/(1−β₂ᵗ)      (Loshchilov & Hutter 2019)

`step` lives in the parameter group (an int), not beside each tensor: megatron-core saves and reshards group
entries, and a run that resumes counts on from the same t.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch


class AdamW(torch.optim.Optimizer):
    """Decoupled weight decay; `adam_w_mode=False` adds λθ to the gradient instead (Adam with L2)."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adam_w_mode: bool = True,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.adam_w_mode = adam_w_mode

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of every parameter that has a gradient."""
        assert closure is None, "a closure would recompute the forward pass outside the pipeline schedule"
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            params = [p for p in group["params"] if p.grad is not None]
            if params:
                self._update(group, params)
        return None

    def _update(self, group: dict[str, Any], params: list[torch.Tensor]) -> None:
        for p in params:
            if not self.state[p]:
                self.state[p] = {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
        beta1, beta2 = group["betas"]
        # One pass over memory. The same update as _foreach operations makes seven, and allocates a denominator.
        update = torch._fused_adamw_ if self.adam_w_mode else torch._fused_adam_
        update(
            params,
            [p.grad for p in params],  # type: ignore[misc]
            [self.state[p]["exp_avg"] for p in params],
            [self.state[p]["exp_avg_sq"] for p in params],
            [],  # AMSGrad's maxima
            [torch.tensor(float(group["step"]))] * len(params),
            lr=group["lr"],
            beta1=beta1,
            beta2=beta2,
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
        )
