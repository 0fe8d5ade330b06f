"""The optimizer of a rank: megatron-core's, for gradients that are sums over tokens until they are used.

Division by the number of tokens and clipping are factors of the same update, which reads each gradient anyway:

    g = G / T        ‖g‖ = ‖G‖ / T        clipped: g · min(1, c / (‖g‖ + 10⁻⁶)) = G / D
    D = T · max(1, (‖G‖ / T + 10⁻⁶) / c)

with G the sum over the T trained tokens of the global batch, and c the norm to clip to. A step therefore reads or
writes all gradients three times (to clear them, for ‖G‖, for the update), and not twice more to scale them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.optimizer import ChainedOptimizer
from torch import Tensor


class MeanGradientOptimizer(ChainedOptimizer):
    """Optimizers that step together on the mean gradient over tokens, clipped by the norm over all their parameters."""

    def __init__(self, parts: Sequence[Any], *, clip: float) -> None:
        """`clip` is the largest norm of the mean gradient; 0 does not clip. The parts update with `optim.adamw`."""
        super().__init__(list(parts))
        self.clip = clip or math.inf
        self._tokens: Tensor | None = None

    def expect_sums(self, tokens: Tensor) -> None:
        """Set the number of tokens that the next step's gradients are sums over: a tensor on the device."""
        self._tokens = tokens

    @torch.no_grad()
    def step(self) -> tuple[bool, float | None, None]:
        """Update with the mean gradient; return whether it did (fp16 may overflow) and the norm of the *sums*."""
        if self.prepare_grads():
            return False, None, None
        norm = self.get_grad_norm()
        assert self._tokens is not None, "`expect_sums` precedes each step"
        divisor, self._tokens = divisor_of(norm, self._tokens, clip=self.clip), None
        for part in self.chained_optimizers:
            if not part.is_stub_optimizer:
                part.optimizer.divisor = divisor
        return self.step_with_ready_grads(), norm, None


def divisor_of(norm: float, tokens: Tensor, *, clip: float) -> Tensor:
    """Return D [] in fp32, for gradients whose sums over `tokens` tokens have this norm."""
    count = tokens.double().clamp(min=1).reshape(())  # without tokens the gradients are zero
    return (count * ((norm / count + 1e-6) / clip).clamp(min=1)).float()
