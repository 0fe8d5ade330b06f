"""Compare copies of weights between ranks, to find a device that computes or stores wrongly.

Data-parallel replicas hold equal weights (with ZeRO-2 and 3 the ranks of all shard groups that hold the same rows),
expert-data-parallel ranks equal experts, and tensor-parallel ranks equal weights that are not cut (norms, some biases).
"""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from megavlm.errors import DeviceFault
from megavlm.model.vlm import bare_chunk
from megavlm.optim.fully_sharded import FullyShardedChunk
from megavlm.parallel.rendezvous import of_all_ranks
from megavlm.parallel.shards import local_part
from megavlm.train.hooks.hook import RankHook
from megavlm.train.run import Run

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Report = Callable[..., None]  # kind, iteration, reason, details of an event


@dataclass(frozen=True)
class CopyDifference:
    """A weight whose copies differ, and the ranks to blame: the minority, or all if there is no majority."""

    ranks: tuple[int, ...]
    weight: str


class DeviceChecks(RankHook):
    """Compares copies every `numerics.check_weight_hash_across_dp_replicas_interval` steps."""

    def __init__(self, run: Run, report: Report) -> None:
        self._engine, self._report = run.engine, report
        self._interval = run.config.numerics.check_weight_hash_across_dp_replicas_interval
        self._iteration = 0

    def on_step_begin(self, iteration: int) -> None:
        """Note the iteration."""
        self._iteration = iteration

    def judge(self, loss: float, norm: float | None) -> str | None:
        """Raise DeviceFault on all ranks if copies differ; its message names the faulty ranks and their machines."""
        if not self._interval or self._iteration % self._interval:
            return None
        found = differing_copies(self._engine.model_chunks)
        if found is None:
            return None
        hosts = of_all_ranks(os.environ.get("SLURMD_NODENAME") or socket.gethostname())
        machines = sorted({hosts[rank] for rank in found.ranks})
        *most, last = map(str, found.ranks)
        who = f"ranks {', '.join(most)} and {last} differ" if most else f"rank {last} differs from the others"
        line = f"{who} in {found.weight} (on {', '.join(machines)})"
        self._report("mismatch", self._iteration, line, culprits=list(found.ranks), module=found.weight, hosts=machines)
        raise DeviceFault(
            f"iteration {self._iteration}: {line}: a device computes or stores wrongly; replace the machine, and go on "
            "from a checkpoint"
        )


def differing_copies(chunks: Sequence[Any]) -> CopyDifference | None:
    """Return the first weight whose copies differ, equal on all ranks; None if all agree. Every rank calls it.

    Each rank reads its weights once; 8 bytes of each tensor travel.
    """
    found = [
        difference
        for chunk in chunks
        for group, tensors in _copies(chunk)
        if group is not None and group.size() > 1 and tensors
        if (difference := _differing(group, tensors, _device_of(chunk))) is not None
    ]
    return next((each for differences in of_all_ranks(found) for each in differences), None)


def _copies(chunk: Any) -> Iterator[tuple[dist.ProcessGroup | None, dict[str, Tensor]]]:
    """Yield each group of ranks that hold copies of weights of a chunk, with these weights by name."""
    bare = bare_chunk(chunk)
    groups, params = bare.groups, dict(bare.named_parameters())
    experts = {name for name, param in params.items() if not getattr(param, "allreduce", True)}
    held = {name: local_part(param) for name, param in params.items()}
    yield (
        groups.replicas if isinstance(chunk, FullyShardedChunk) else groups.dp_cp,
        {name: held[name] for name in params if name not in experts},
    )
    yield groups.collection.expt_dp, {name: held[name] for name in params if name in experts}
    uncut = (name for name, param in params.items() if not getattr(param, "tensor_model_parallel", False))
    yield groups.tp, {name: held[name] for name in uncut}
    yield groups.tied, {name: held[name] for name, param in params.items() if hasattr(param, "shared_embedding")}


def _device_of(chunk: Any) -> torch.device:
    """Return the device of a chunk's computations: its weights may be on the host, which does not communicate."""
    return chunk.device if isinstance(chunk, FullyShardedChunk) else next(chunk.parameters()).device


def _differing(group: dist.ProcessGroup, tensors: Mapping[str, Tensor], device: torch.device) -> CopyDifference | None:
    """Return the first tensor whose copies differ; every rank of the group calls it with its own copies."""
    own = torch.stack([checksum(tensor).to(device) for tensor in tensors.values()])
    gathered = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(gathered, own, group=group)
    table = torch.stack(gathered).tolist()
    for index, name in enumerate(tensors):
        if odd := minority([row[index] for row in table]):
            return CopyDifference(tuple(dist.get_global_rank(group, each) for each in odd), name)
    return None


def checksum(values: Tensor) -> Tensor:
    """Return the sum of the bits of each number, as integers modulo 2⁶⁴; any single changed number changes it."""
    if type(values) not in (Tensor, Parameter):
        values = values.float()  # FP8 weights
    return values.detach().contiguous().view(_BITS[values.element_size()]).sum(dtype=torch.int64)


def minority(values: Sequence[int]) -> list[int]:
    """Return the indices whose value differs from the majority's; all indices if there is no majority."""
    value, count = Counter(values).most_common(1)[0]
    if 2 * count <= len(values):
        return list(range(len(values)))
    return [place for place, each in enumerate(values) if each != value]
