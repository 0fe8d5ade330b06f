"""Read this rank's part of tensors that torch's `fully_shard` has distributed over ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


def local_part(tensor: Any) -> Tensor:
    """Return this rank's part of a DTensor, and any other tensor itself, without gradient."""
    with torch.no_grad():
        part: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()
    return part
