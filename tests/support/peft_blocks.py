"""Which entries of PEFT's B are trained here."""

from __future__ import annotations

import torch
from torch import Tensor

from megavlm.config.schema import Config


def trained_entries(name: str, b: Tensor, config: Config) -> Tensor:
    """Return 1 where an entry of PEFT's B [out, rank of the module] is trained here, and 0 elsewhere.

    Query, key and value have an adapter each here, and so have the gate and the input of a gated MLP. Where the Hugging
    Face model fuses such layers into one, B consists of as many diagonal blocks; PEFT by itself would train the zeros
    beside them, too. `name` is B's: a tower that fuses queries and keys may have fewer heads of keys.
    """
    vision, rank = config.model.vision, config.lora.rank
    blocks = b.shape[1] // rank
    assert b.shape[1] == blocks * rank
    heads = [1] * blocks
    if ".attn.qkv." in name and vision.num_query_groups:
        heads = [vision.num_attention_heads, vision.num_query_groups, vision.num_query_groups]
    rows = b.shape[0] // sum(heads)
    return torch.block_diag(*[torch.ones(rows * count, rank) for count in heads])
