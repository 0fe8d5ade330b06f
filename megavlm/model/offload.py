"""`--offload activations`: what a layer saves for its backward pass, in host memory until then.

Copies to the host are queued behind the computation that made the tensors, copies back before the one that takes them,
on the same stream: nothing overlaps, and nothing has to be waited for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

# Numbers below which a tensor stays: its transfer would cost a latency and save next to nothing.
_SMALLEST = 1024


class SavedOnHost(saved_tensors_hooks):
    """While this is active, what autograd saves is moved to (pinned) host memory, but for the layer's own parameters,
    which are there anyway.
    """

    def __init__(self, layer: nn.Module, *, smallest: int = _SMALLEST) -> None:
        super().__init__(_packer(layer, smallest), _unpacked)


def _packer(layer: nn.Module, smallest: int) -> Callable[[Tensor], Any]:
    kept: set[int] = set()

    def pack(tensor: Tensor) -> Any:
        if not kept:  # asked for now: parameters that ranks share are whole only while the layer runs
            kept.update(param.untyped_storage().data_ptr() for param in layer.parameters())
        if tensor.numel() < smallest or tensor.untyped_storage().data_ptr() in kept:
            return tensor
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        return tensor.device, host.copy_(tensor, non_blocking=True)

    return pack


def _unpacked(packed: Any) -> Tensor:
    if isinstance(packed, Tensor):
        return packed
    device, host = packed
    back: Tensor = host.to(device, non_blocking=True)
    return back
