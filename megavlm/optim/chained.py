"""Optimizer of a rank, on megatron-core's: gradients are sums over tokens, and are divided during the update.

Division by the number of tokens and clipping are factors of the same update, which reads each gradient anyway:

    g = G / T        ‖g‖ = ‖G‖ / T        clipped: g · min(1, c / (‖g‖ + 10⁻⁶)) = G / D
    D = T · max(1, (‖G‖ / T + 10⁻⁶) / c)

with G the sum over the T trained tokens of the global batch, and c the norm to clip to. A step therefore reads or
writes all gradients three times (to clear them, for ‖G‖, for the update), and not twice more to scale them.

The norm and the update are two calls: in between, the host reads ‖G‖, T and the loss, in the only synchronisation of a
step, and decides whether to update weights.

The schedules of the learning rate are those of Transformers (`get_cosine_schedule_with_warmup`,
`get_linear_schedule_with_warmup`, `get_wsd_schedule` with a linear decay), which count steps from 0: after the warm-up,
iteration k trains with the rate of step k - 1, so the first iteration of the decay has the peak, and the last still
trains. Only the warm-up of W iterations is a step ahead: its first iteration has 1/W of the peak, where Transformers'
step 0 has the rate 0.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer import ChainedOptimizer, clip_grads
from torch import Tensor

from megavlm.config.schema import OptimizerConfig
from megavlm.optim.master_weights import average
from megavlm.optim.matrices import MatrixUpdates
from megavlm.optim.qk_clip import QKClip


class MeanGradientOptimizer(ChainedOptimizer):
    """Optimizers that step together on the mean gradient over tokens, clipped by the norm over all their parameters."""

    def __init__(
        self,
        parts: Sequence[Any],
        *,
        clip: float,
        matrices: Sequence[MatrixUpdates] = (),
        qk_clip: Sequence[QKClip] = (),
        ema_decay: float = 0.0,
    ) -> None:
        """`clip` is the largest norm of the mean gradient; 0 does not clip. The parts update with
        `optim.elementwise`, after `matrices` have been, and end with `qk_clip`; then weights enter their averages, if
        `ema_decay` is not 0.
        """
        super().__init__(list(parts))
        self.clip = clip or math.inf
        self.matrices, self.qk_clip, self.ema_decay = tuple(matrices), tuple(qk_clip), ema_decay

    @torch.no_grad()
    def squared_norm(self) -> Tensor | None:
        """Prepare the gradients of a step and return this rank's addend of ‖G‖² ([] float64, on the device); None if
        fp16 overflowed on any rank.

        Of gradients that several ranks hold alike each counts its `share`, so that ‖G‖² is the sum over the world.
        """
        if self.prepare_grads():
            return None
        gradients = defaultdict[float, list[Tensor]](list)
        for part in self.chained_optimizers:
            gradients[part.share] += part.get_main_grads_for_grad_norm()
        return torch.stack([share * self._sum_of_squares(held) for share, held in gradients.items()]).sum()

    @torch.no_grad()
    def prepare_grads(self) -> bool:
        """Prepare the gradients of all parts; return whether fp16 overflowed in any of them, on any rank.

        All parts keep the same loss scale, which an overflow of any part lowers: the loss is multiplied by the scale of
        the first part, and each part divides its gradients by its own (experts are a part of their own).
        """
        scalers = [part.grad_scaler for part in self.chained_optimizers if getattr(part, "grad_scaler", None)]
        before = [scaler.state_dict() for scaler in scalers]
        overflowed = super().prepare_grads()
        if scalers:
            found = torch.tensor(float(overflowed), device=self._device)
            dist.all_reduce(found, op=dist.ReduceOp.MAX)
            overflowed = bool(found)
        for scaler, state in zip(scalers, before, strict=True):
            scaler.load_state_dict(state)
            scaler.update(overflowed)
        return overflowed

    @torch.no_grad()
    def update(self, *, norm: float, tokens: float, logits: Tensor | None = None) -> None:
        """Update with the mean gradient, given ‖G‖ (`norm`) and the number of trained tokens in the global batch.

        `logits` are the largest logits of each head, for `qk_clip`.
        """
        divisor = divisor_of(norm, tokens, clip=self.clip)
        for part in self.chained_optimizers:
            if not part.is_stub_optimizer:
                part.optimizer.divisor = divisor
        for wholes in self.matrices:
            wholes.update(divisor)
        for projections in self.qk_clip:
            assert logits is not None, "all ranks have looked at the logits of the step"
            projections.expect(logits)
        self.step_with_ready_grads()
        if self.ema_decay:
            average(self, self.ema_decay)

    @property
    def _device(self) -> torch.device:
        return self.get_loss_scale().device

    def _sum_of_squares(self, gradients: list[Tensor]) -> Tensor:
        """Return the sum of squares on this rank; megatron-core's `get_grad_norm_fp32` would make the host wait."""
        squares = [torch.zeros(1, dtype=torch.float64, device=self._device)]
        # A rank may hold no rows of a parameter, and Transformer Engine's kernel loses what precedes an empty tensor.
        gradients = [gradient for gradient in gradients if gradient.numel()]
        if here := [gradient for gradient in gradients if gradient.device.type == self._device.type]:
            overflow = torch.zeros(1, dtype=torch.int, device=self._device)
            norm, _ = clip_grads.multi_tensor_applier(clip_grads.l2_norm_impl, overflow, [here], False)
            squares.append(norm**2.0)
        if on_host := [gradient for gradient in gradients if gradient.device.type != self._device.type]:
            norms = torch.stack(torch._foreach_norm(on_host)).to(self._device, non_blocking=True)
            squares.append((norms**2.0).sum().view(1))
        return torch.cat(squares).sum()


def divisor_of(norm: float, tokens: float, *, clip: float) -> float:
    """Return the divisor D for gradients summed over `tokens` tokens, with the norm ‖G‖ = `norm`."""
    count = max(tokens, 1.0)  # of no tokens the gradients are zero
    return count * max((norm / count + 1e-6) / clip, 1.0)


def learning_rate(options: OptimizerConfig, iteration: int, *, peak: float, floor: float) -> float:
    """Return the learning rate of an iteration (from 1) in a schedule that rises to `peak` and falls to `floor`.

    `floor` is the rate of iterations after `--lr-decay-iters`.
    """
    warmup, end = options.lr_warmup_iters, options.lr_decay_iters
    if 0 < iteration <= warmup:
        return peak * iteration / warmup
    if options.lr_decay_style == "constant":
        return peak
    length = options.lr_wsd_decay_iters if options.lr_decay_style == "WSD" else end - warmup
    left = min(max((end - iteration + 1) / length, 0.0), 1.0)  # of the decay
    if options.lr_decay_style == "cosine":
        left = (1.0 - math.cos(math.pi * left)) / 2
    return floor + left * (peak - floor)


class LearningRate:
    """Sets the learning rate and the weight decay of each parameter group of an optimizer."""

    def __init__(self, options: OptimizerConfig, optimizer: Any) -> None:
        self.options = options
        self.optimizer = optimizer
        self.num_steps = 0

    def step(self, increment: int) -> None:
        """Advance by `increment` iterations: before each update, and on resume from 0 to the checkpoint's iteration."""
        self.num_steps += increment
        options = self.options
        for group in self.optimizer.param_groups:
            peak, floor = group.get("max_lr", options.lr), group.get("min_lr", options.min_lr)
            group["lr"] = learning_rate(options, self.num_steps, peak=peak, floor=floor)
            group["weight_decay"] = options.weight_decay * group.get("wd_mult", 1.0)

    def current(self) -> float:
        """Return the current learning rate of modules without a rate of their own (`--lr`)."""
        return learning_rate(self.options, self.num_steps, peak=self.options.lr, floor=self.options.min_lr)
