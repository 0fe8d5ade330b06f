"""`--offload optimizer`: Adam's moments in host memory, updated there.

Gradients and master weights stay where they are; for an update each parameter's go to the host and the weights come
back (12 bytes a parameter over the bus, a step). Of the 12 bytes of state that a parameter has under bf16, 8 leave the
device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megavlm.backend.adamw import AdamW, local


class HostAdamW(AdamW):
    """AdamW whose state never was on the device. Steps give the numbers of `AdamW` on a CPU."""

    def _moments(self, p: Tensor) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[p]
        if not state:
            size = local(p).shape
            state.update({name: torch.zeros(size, dtype=p.dtype) for name in ("exp_avg", "exp_avg_sq")})
        return state

    def _update(self, group: dict[str, Any], params: list[Tensor]) -> None:
        for p in params:
            moments, value = self._moments(p), local(p)
            on_host, gradient = _to_host(value), _to_host(local(p.grad))
            if value.is_cuda:
                torch.cuda.current_stream(value.device).synchronize()
            self._fused(group, [on_host], [gradient], [moments])
            value.copy_(on_host, non_blocking=True)  # pinned memory is not given out again before this has happened


def _to_host(tensor: Tensor) -> Tensor:
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return copy.copy_(tensor, non_blocking=True)
