"""The most memory that this rank has used."""

from __future__ import annotations

import resource

import torch

_UNIT = 1024  # of `ru_maxrss` on Linux, in bytes


def peak_memory(device: torch.device) -> int:
    """Return the most bytes that tensors have taken on a GPU so far, or that this process has taken on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return _UNIT * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
