"""AdamW with the interface of the fused GPU optimizers, in plain torch.

    g ← g / divisor, where there is one
    m ← β₁ m + (1−β₁) g          v ← β₂ v + (1−β₂) g²
    θ ← θ (1 − lr·λ) − lr · m̂ / (√v̂ + ε),   m̂ = m/(1−β₁ᵗ), v̂ = v/(1−β₂ᵗ)      (Loshchilov & Hutter 2019)

`step` lives in the parameter group (an int), not beside each tensor: checkpoints keep it there, and a run that resumes
counts on from the same t.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from megavlm.parallel.dtensor import local_part

AVERAGE = "ema"  # name of averages in the state, and in checkpoints


class AdamW(torch.optim.Optimizer):
    """Decoupled weight decay; `adam_w_mode=False` adds λθ to the gradient instead (Adam with L2).

    Of a parameter that is sharded (a DTensor) each rank updates its part.
    """

    moments: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")  # what is kept of each parameter
    divisor: float | None = None  # what the next step divides gradients by, in place, as it reads them

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adam_w_mode: bool = True,
    ) -> None:
        # `bias_correction` is what the fused optimizers read in a group that they resume.
        defaults = {"lr": lr, "bias_correction": True, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)
        self.adam_w_mode = adam_w_mode
        self.matrices: set[Tensor] = set()  # parameters that `optim/muon.py` updates, of which one momentum is kept
        self.finish: Callable[[], None] = lambda: None  # called at the end of a step (`optim/qk_clip.py`)
        self.averages = False  # whether `optim/averages.py` keeps an average of each parameter

    @classmethod
    def in_place_of(cls, optimizer: torch.optim.Optimizer) -> Self:
        """With another optimizer's parameter groups, their options reduced to ours. In fp32 megatron-core's parameters
        are slices, no leaf tensors, which a constructor would refuse.
        """
        ours = cls([torch.empty(0)])
        ours.param_groups = optimizer.param_groups
        for group in ours.param_groups:
            for name in optimizer.defaults.keys() - ours.defaults.keys():
                group.pop(name, None)
            group.setdefault("bias_correction", True)
        return ours

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient."""
        assert closure is None, "a closure would recompute the forward pass outside the pipeline schedule"
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            params = [p for p in group["params"] if p.grad is not None and local_part(p).numel()]
            params = [p for p in params if p not in self.matrices]
            if params:
                self._update(group, params)
        self.finish()
        return None

    def begin(self) -> None:
        """Give every parameter its state, as the first step would."""
        for group in self.param_groups:
            for p in group["params"]:
                self.state_of(p)

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load groups and moments; moments keep their device (the base class moves them to the parameters')."""
        params = [p for group in self.param_groups for p in group["params"]]
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({name: value for name, value in saved.items() if name != "params"})
            if "step" in group:
                group["step"] = int(group["step"])
        for index, p in enumerate(params):
            if index in state_dict["state"]:
                saved_state = state_dict["state"][index]
                for name, kept in self.state_of(p).items():
                    if name in saved_state:  # a checkpoint may have no averages
                        kept.copy_(saved_state[name])

    def _update(self, group: dict[str, Any], params: list[Tensor]) -> None:
        moments = [self.state_of(p) for p in params]
        values, gradients = [local_part(p) for p in params], [local_part(p.grad) for p in params]
        self._apply(group, values, gradients, moments, self.divisor_on(values[0].device))

    def divisor_on(self, device: torch.device) -> Tensor | None:
        """Return what gradients on a device are divided by ([] float32), which may be the host; None: by nothing."""
        return None if self.divisor is None else torch.full((), self.divisor, dtype=torch.float32, device=device)

    def state_of(self, p: Tensor) -> dict[str, Tensor]:
        """Return what is kept of a parameter: moments, which begin with zeros, and maybe an average."""
        state: dict[str, Tensor] = self.state[p]
        if not state:
            names = ("momentum",) if p in self.matrices else self.moments
            state.update({name: self._zeros_like(local_part(p)) for name in names})
            self._begin_average(p, state)
        return state

    def _begin_average(self, p: Tensor, state: dict[str, Tensor]) -> None:
        """Let the average of a parameter, where one is kept, begin with the parameter itself."""
        if self.averages:
            state[AVERAGE] = self._zeros_like(local_part(p)).copy_(local_part(p.detach()))

    def _zeros_like(self, values: Tensor) -> Tensor:
        return torch.zeros_like(values)

    def _apply(
        self,
        group: dict[str, Any],
        values: Sequence[Tensor],
        gradients: Sequence[Tensor],
        moments: Sequence[dict[str, Tensor]],
        divisor: Tensor | None,
    ) -> None:
        beta1, beta2 = group["betas"]
        # One pass over memory. The same update as _foreach operations makes seven, and allocates a denominator.
        update = torch._fused_adamw_ if self.adam_w_mode else torch._fused_adam_
        update(
            list(values),
            list(gradients),
            [each["exp_avg"] for each in moments],
            [each["exp_avg_sq"] for each in moments],
            [],  # AMSGrad's maxima
            [torch.full((), float(group["step"]), device=values[0].device)] * len(values),
            lr=group["lr"],
            beta1=beta1,
            beta2=beta2,
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
            grad_scale=divisor,
        )
