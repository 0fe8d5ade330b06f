"""Check that data-parallel replicas hold the same weights, by a checksum of each parameter."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megavlm.model.vlm import VLMChunk
from megavlm.optim.fully_sharded import FullyShardedChunk
from megavlm.parallel.dtensor import local_part


def differing_replicas(chunks: Sequence[Any]) -> str | None:
    """Return which ranks differ in which parameter, in words and on all ranks alike; None if none do.

    Every rank calls it while it has the weights that a step used. Each rank reads its weights once; 8 bytes of each
    parameter travel. Ranks that share weights (ZeRO-2 and 3) are compared with their counterparts of HSDP.
    """
    found = [complaint for chunk in chunks if (complaint := _differing(chunk)) is not None]
    every: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(every, found)
    return next((each for complaints in every for each in complaints), None)


def _differing(chunk: Any) -> str | None:
    shared = isinstance(chunk, FullyShardedChunk)
    bare = chunk
    while not isinstance(bare, VLMChunk):
        bare = bare.module
    group = bare.groups.replicas if shared else bare.groups.dp_cp
    if group is None or group.size() == 1:
        return None
    names, params = zip(*bare.named_parameters(), strict=True)
    own = torch.stack([checksum(local_part(param)) for param in params])
    gathered = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(gathered, own, group=group)
    table = torch.stack(gathered).tolist()
    for index, name in enumerate(names):
        odd = minority([row[index] for row in table])
        if odd:
            ranks = " and ".join(str(dist.get_global_rank(group, each)) for each in odd)
            return (
                f"ranks {ranks} differ" if len(odd) > 1 else f"rank {ranks} differs from the others"
            ) + f" in {name}"
    return None


def checksum(values: Tensor) -> Tensor:
    """Return the sum of the bits of fp32 values, as integers modulo 2⁶⁴: any one number that changes, changes it."""
    return values.float().reshape(-1).view(torch.int32).sum(dtype=torch.int64)


def minority(values: Sequence[int]) -> list[int]:
    """Return the places whose value is not that of the majority; all places if there is no majority."""
    value, count = Counter(values).most_common(1)[0]
    if 2 * count <= len(values):
        return list(range(len(values)))
    return [place for place, each in enumerate(values) if each != value]
