"""Which entries of PEFT's B are trained here."""

from __future__ import annotations

import torch
from torch import Tensor


def trained_entries(b: Tensor, rank: int) -> Tensor:
    """Return 1 where an entry of PEFT's B [out, rank of the module] is trained here, and 0 elsewhere.

    Query, key and value have an adapter each here. Where the Hugging Face model has one fused layer for the three, B
    consists of three diagonal blocks; PEFT by itself would train the zeros beside them, too.
    """
    if b.shape[1] == rank:
        return torch.ones_like(b)
    assert b.shape[1] == 3 * rank
    return torch.block_diag(*[torch.ones(b.shape[0] // 3, rank)] * 3)
