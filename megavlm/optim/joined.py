"""The optimizer of a rank: megatron-core's, of gradients that stay sums over tokens until they are used.

To divide by the number of tokens and to clip are factors of the same update, which reads each gradient anyway:

    g = G / T        ‖g‖ = ‖G‖ / T        clipped: g · min(1, c / (‖g‖ + 10⁻⁶)) = G / D
    D = T · max(1, (‖G‖ / T + 10⁻⁶) / c)

with G the sum over the T trained tokens of the global batch, and c the norm to clip to. So a step passes over gradients
to clear them, for ‖G‖ and for the update, and not twice more to scale them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.optimizer import ChainedOptimizer
from torch import Tensor


class JoinedOptimizer(ChainedOptimizer):
    """Parts that step together: the gradient norm, and clipping to it, is that of all their parameters."""

    def __init__(self, parts: Sequence[Any], *, clip: float) -> None:
        """`clip` is the largest norm of mean gradients; 0 clips nothing. Parts update by `optim.adamw`."""
        super().__init__(list(parts))
        self.clip = clip or math.inf
        self._tokens: Tensor | None = None

    def expect_sums(self, tokens: Tensor) -> None:
        """Gradients are sums over so many tokens (a number on the device, not waited for) until the next step."""
        self._tokens = tokens

    @torch.no_grad()
    def step(self) -> tuple[bool, float | None, None]:
        """Update on the mean gradient. Returns whether it did (fp16 may overflow), and the norm of the *sums*."""
        if self.prepare_grads():
            return False, None, None
        norm = self.get_grad_norm()
        assert self._tokens is not None, "who reduces gradients says what they are summed over"
        divisor, self._tokens = divisor_of(norm, self._tokens, clip=self.clip), None
        for part in self.chained_optimizers:
            if not part.is_stub_optimizer:
                part.optimizer.divisor = divisor
        return self.step_with_ready_grads(), norm, None


def divisor_of(norm: float, tokens: Tensor, *, clip: float) -> Tensor:
    """[] float32: D of gradients whose sums over so many tokens have this norm."""
    count = tokens.double().clamp(min=1).reshape(())  # of no tokens the gradients are zero
    return (count * ((norm / count + 1e-6) / clip).clamp(min=1)).float()
