"""Check that ranks hold equal copies of what they must hold alike, by a checksum of each tensor.

| copies of | are held by |
|---|---|
| weights | data-parallel replicas; with ZeRO-2 and 3 the ranks of all shard groups that hold the same rows |
| weights of experts | expert-data-parallel ranks |
| weights that tensor parallelism does not cut (norms, some biases, the patch embedding) | tensor-parallel ranks |
| fp32 weights and moments | data-parallel replicas without sharding, else those of all shard groups; and as above |

With ZeRO-1, 2 and 3 and without `--hybrid-shard-size` there is one shard group, so moments have no copies but between
tensor-parallel ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from megavlm.model.vlm import bare_chunk
from megavlm.optim.fully_sharded import FullyShardedChunk
from megavlm.optim.master_weights import held_state
from megavlm.parallel.shards import local_part

_WORDS = {
    "param": "fp32 weights",
    "exp_avg": "first moment",
    "exp_avg_sq": "second moment",
    "momentum": "momentum",
    "ema": "averaged weights",
}
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Difference:
    """What is not equal, and the ranks to blame: those in the minority, or all if there is no majority."""

    ranks: tuple[int, ...]
    what: str


def differing_copies(chunks: Sequence[Any], optimizer: Any) -> Difference | None:
    """Return the first difference between copies, equal on all ranks; None if there is none.

    Every rank calls it while it has the weights that a step used. Each rank reads its weights and moments once; 8 bytes
    of each tensor travel.
    """
    states = dict(held_state(optimizer))
    found = [
        difference
        for chunk in chunks
        for group, tensors in _copies(chunk, states)
        if group is not None and group.size() > 1 and tensors
        if (difference := _differing(group, tensors, _device_of(chunk))) is not None
    ]
    every: list[list[Difference]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(every, found)
    return next((each for differences in every for each in differences), None)


def _copies(
    chunk: Any, states: Mapping[Tensor, Mapping[str, Tensor]]
) -> Iterator[tuple[dist.ProcessGroup | None, dict[str, Tensor]]]:
    """Yield the ranks that hold copies of some tensors of a chunk, with these tensors by what they are."""
    bare = bare_chunk(chunk)
    groups, params = bare.groups, dict(bare.named_parameters())
    weights = {name: local_part(param) for name, param in params.items()}
    held = {
        name: {f"the {_WORDS[kind]} of {name}": state for kind, state in states.get(param, {}).items()}
        for name, param in params.items()
    }
    uncut = [name for name, param in params.items() if not getattr(param, "tensor_model_parallel", False)]
    unshared = bare.run_config.parallel.data_parallel_sharding == "none"
    experts = [name for name, param in params.items() if not getattr(param, "allreduce", True)]
    dense = [name for name in params if name not in experts]
    every = groups.replicas if isinstance(chunk, FullyShardedChunk) else groups.dp_cp
    yield every, {name: weights[name] for name in dense}
    yield groups.dp_cp if unshared else groups.replicas, _joined(held[name] for name in dense)
    of_experts = {name: weights[name] for name in experts}
    yield groups.collection.expt_dp, of_experts | _joined(held[name] for name in experts if unshared)
    yield groups.tp, {name: weights[name] for name in uncut} | _joined(held[name] for name in uncut)
    yield groups.tied, {name: weights[name] for name, param in params.items() if hasattr(param, "shared_embedding")}


def _joined(parts: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    return {what: tensor for part in parts for what, tensor in part.items()}


def _device_of(chunk: Any) -> torch.device:
    """Return where a chunk computes: its weights and moments may be on the host, which does not communicate."""
    device: torch.device = chunk.device if isinstance(chunk, FullyShardedChunk) else next(chunk.parameters()).device
    return device


def _differing(group: dist.ProcessGroup, tensors: Mapping[str, Tensor], device: torch.device) -> Difference | None:
    """Return the first tensor whose copies differ; every rank of the group calls it with its own copies."""
    own = torch.stack([checksum(tensor).to(device) for tensor in tensors.values()])
    gathered = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(gathered, own, group=group)
    table = torch.stack(gathered).tolist()
    for index, what in enumerate(tensors):
        if odd := minority([row[index] for row in table]):
            return Difference(tuple(dist.get_global_rank(group, each) for each in odd), what)
    return None


def checksum(values: Tensor) -> Tensor:
    """Return the sum of the bits of each number, as integers modulo 2⁶⁴: any one number that changes, changes it."""
    if type(values) not in (Tensor, Parameter):
        values = values.float()  # FP8 weights
    return values.detach().contiguous().view(_BITS[values.element_size()]).sum(dtype=torch.int64)


def minority(values: Sequence[int]) -> list[int]:
    """Return the places whose value is not that of the majority; all places if there is no majority."""
    value, count = Counter(values).most_common(1)[0]
    if 2 * count <= len(values):
        return list(range(len(values)))
    return [place for place, each in enumerate(values) if each != value]
