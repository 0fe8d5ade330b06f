"""Which entries of PEFT's B are trained here, and which of its A are one."""

from __future__ import annotations

from typing import Any

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


def with_one_a(theirs: Any) -> Any:
    """Return the PEFT model, in which queries and a gate of attention's output share their A, as they do here."""
    for module in theirs.modules():
        gate: Any = getattr(module, "gate_proj", None)
        if hasattr(module, "q_proj") and hasattr(gate, "lora_A"):
            gate.lora_A = module.q_proj.lora_A
    return theirs
