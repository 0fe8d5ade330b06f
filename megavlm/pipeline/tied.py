"""Tied embeddings on two stages: both copies take the sum of both gradients, so they stay equal.

megatron-core synchronises copies on the first and last pipeline stage. Here the first language stage may be any
stage, or even another chunk of the last rank, so the copies are joined by our own group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from megavlm.parallel.groups import Groups


def sum_tied_gradients(chunks: Sequence[Any], groups: Groups) -> None:
    """Add up `main_grad` of the tied copies in place: first those on this rank, then over the ranks that hold one.

    With the distributed optimizer only a rank's own shard of `main_grad` is reduced over data-parallel ranks at
    this point. megatron-core gives shared embeddings a bucket of their own, so copies are sharded alike and the sum
    of equal shards is right.
    """
    copies: list[Tensor] = [
        param.main_grad
        for chunk in chunks
        for param in chunk.parameters()
        if getattr(param, "shared_embedding", False) and param.requires_grad
    ]
    if not copies:
        return
    total = copies[0]
    for other in copies[1:]:
        total += other
    if groups.tied is not None:
        dist.all_reduce(total, group=groups.tied)
    for other in copies[1:]:
        other.copy_(total)
