"""What the host does to a micro-batch before it travels to a device, in the thread that reads ahead."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from megavlm.data.batch import MicroBatch


@dataclass(frozen=True)
class Staging:
    """Patches in the type that the model computes in, and, for a GPU, everything in page-locked memory, from which a
    copy runs beside the computation and nobody waits for it.

    The first layer casts patches to its weights' type in any case: the numbers are the same, the bytes half.
    """

    dtype: torch.dtype
    device: torch.device

    def __call__(self, batch: MicroBatch) -> MicroBatch:
        # A new thread begins on the first device of its machine, where page-locked memory would open a context.
        here = torch.cuda.device(self.device) if self._pins else nullcontext()
        with here:
            staged: dict[str, Any] = {name: self._staged(name, value) for name, value in batch.travelling().items()}
        return replace(batch, **staged)

    def _staged(self, name: str, value: Tensor) -> Tensor:
        dtype = self.dtype if name == "patches" else value.dtype
        if not self._pins:
            return value.to(dtype)
        return torch.empty(value.shape, dtype=dtype, pin_memory=True).copy_(value)

    @property
    def _pins(self) -> bool:
        return self.device.type == "cuda"
