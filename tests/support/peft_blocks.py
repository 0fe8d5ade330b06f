"""Which entries of PEFT's B are trained here."""

from __future__ import annotations

import torch
from torch import Tensor


def trained_entries(b: Tensor, rank: int) -> Tensor:
    """Return 1 where an entry of PEFT's B [out, rank of the module] is trained here, and 0 elsewhere.

    Query, key and value have an adapter each here, and so have the gate and the input of a gated MLP. Where the Hugging
    Face model fuses such layers into one, B consists of as many diagonal blocks; PEFT by itself would train the zeros
    beside them, too.
    """
    blocks = b.shape[1] // rank
    assert b.shape[1] == blocks * rank
    return torch.block_diag(*[torch.ones(b.shape[0] // blocks, rank)] * blocks)
