"""Make the process groups of a layout. This is the only file that touches megatron-core's `parallel_state`."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, model_parallel_cuda_manual_seed

from megavlm.arch.dims import Coordinates, Dims, RowSplit
from megavlm.backend import Backend
from megavlm.errors import RanksMissing, UserError
from megavlm.parallel.rendezvous import Meeting, join, refuse_shared_devices

Found = TypeVar("Found")
ENCODER_RNG = "encoder-rng"  # name of a colocated encoder's dropout generator in megatron-core's tracker


@dataclass(frozen=True)
class ContextGroups:
    """The groups in which context-parallel ranks exchange heads, and gather keys and values."""

    split: RowSplit
    heads: dist.ProcessGroup
    keys: dist.ProcessGroup  # its rank is the number of the group whose keys this rank has

    @classmethod
    def of(
        cls, dims: Dims, collection: ProcessGroupCollection, alone: dist.ProcessGroup, *, timeout: timedelta
    ) -> ContextGroups:
        """Make the groups; every rank calls it. `alone` is a group of this rank only."""
        split = dims.row_split
        if split.groups == 1:
            return cls(split, collection.cp, alone)
        if split.heads == 1:
            return cls(split, alone, collection.cp)
        ranks = np.arange(dims.world).reshape(-1, split.groups, split.heads, dims.tp)
        heads = ranks.transpose(0, 1, 3, 2).reshape(-1, split.heads)
        keys = ranks.transpose(0, 2, 3, 1).reshape(-1, split.groups)
        return cls(split, _group_among(heads.tolist(), timeout=timeout), _group_among(keys.tolist(), timeout=timeout))


@dataclass(frozen=True)
class Groups:
    """The process groups that this rank belongs to. `collection` has them in the form that megatron-core takes."""

    dims: Dims
    coords: Coordinates
    collection: ProcessGroupCollection
    replica: dist.ProcessGroup  # the TP × CP × PP ranks of this rank's model replica, in the order of `replica_rank`
    context: ContextGroups
    alone: dist.ProcessGroup  # this rank only
    tied: dist.ProcessGroup | None  # the two ranks that hold a copy of tied embeddings, if two stages do

    @property
    def tp(self) -> dist.ProcessGroup:
        return self.collection.tp

    @property
    def pp(self) -> dist.ProcessGroup:
        return self.collection.pp

    @property
    def dp(self) -> dist.ProcessGroup:
        """Return the data-parallel ranks: those with this rank's TP, CP and PP coordinates, one of each replica."""
        return self.collection.dp

    @property
    def dp_cp(self) -> dist.ProcessGroup:
        """Return the DP × CP ranks that hold the same parameters and sum their gradients."""
        return self.collection.dp_cp

    @property
    def shard(self) -> dist.ProcessGroup:
        """Return the DP × CP ranks over which optimizer state (and more) is sharded; with HSDP, some of them."""
        return self.collection.intra_dp_cp

    @property
    def replicas(self) -> dist.ProcessGroup | None:
        """Return, with HSDP, the ranks of all shard groups that hold the same shard as this one; None without HSDP."""
        return self.collection.inter_dist_opt if self.shard.size() < self.dp_cp.size() else None

    @property
    def replica_rank(self) -> int:
        """Return this rank's place in its model replica: tp + TP·(cp + CP·pp)."""
        return self.coords.tp + self.dims.tp * (self.coords.cp + self.dims.cp * self.coords.pp)

    @property
    def is_first_tp(self) -> bool:
        """Return whether this is tensor-parallel rank 0, which writes and counts what all of them know alike."""
        return self.coords.tp == 0

    @property
    def is_reader(self) -> bool:
        """Return whether this rank reads the samples of its replica and records the skipped ones."""
        return self.replica_rank == 0


def meet(*, timeout_minutes: float) -> Meeting:
    """Find the other ranks that the environment names (`world_of`); the only process of a world meets itself."""
    if dist.is_initialized():
        return Meeting(dist.distributed_c10d._get_default_store(), dist.get_rank(), dist.get_world_size())
    if dist.is_torchelastic_launched() or int(os.environ.get("WORLD_SIZE", "1")) > 1:
        try:
            return join(timedelta(minutes=timeout_minutes))
        except TimeoutError as error:
            raise RanksMissing(str(error)) from error
    return Meeting(dist.HashStore(), 0, 1)


def start(backend: Backend, *, timeout_minutes: float, meeting: Meeting | None = None) -> None:
    """Initialize torch.distributed with the ranks of `meet`, unless it is initialized.

    NCCL is told this process's device. A barrier would guess it from the rank, which is wrong if machines have
    different numbers of GPUs.
    """
    if dist.is_initialized():
        return
    met = meeting or meet(timeout_minutes=timeout_minutes)
    told = backend.communication == "nccl" and (met.world > 1 or dist.is_torchelastic_launched())
    if told:
        refuse_shared_devices(met, device=str(torch.cuda.get_device_properties(backend.device).uuid))
    begin(backend, met, timeout_minutes=timeout_minutes, told=told)


def begin(backend: Backend, met: Meeting, *, timeout_minutes: float, told: bool) -> None:
    """Initialize torch.distributed; `told`: NCCL is told this process's device, and connects each group at once."""
    dist.init_process_group(
        backend.communication,
        store=met.store,
        rank=met.rank,
        world_size=met.world,
        timeout=timedelta(minutes=timeout_minutes),
        device_id=backend.device if told else None,
    )


def on_rank_0(action: Callable[[], None]) -> None:
    """Run an action on rank 0 while the others wait. A UserError there is raised on every rank, so that none hangs."""
    message: list[str | None] = [None]
    if dist.get_rank() == 0:
        try:
            action()
        except UserError as error:
            message = [str(error)]
    dist.broadcast_object_list(message, src=0)
    if message[0] is not None:
        raise UserError(message[0])


def from_rank_0(action: Callable[[], Found], received: Found) -> Found:
    """Return on all ranks what an action returns on rank 0; other ranks receive it in place of `received`.

    A UserError there is raised on all.
    """
    found = [received]

    def act() -> None:
        found[0] = action()

    on_rank_0(act)
    dist.broadcast_object_list(found, src=0)
    return found[0]


def build_groups(
    dims: Dims, *, tied_owners: tuple[int, ...], seed: int, timeout_minutes: float, shard_size: int | None = None
) -> Groups:
    """Make every process group of a layout and seed the dropout generators; return this rank's groups.

    Args:
        tied_owners: pipeline ranks that hold tied embeddings (first language stage and last stage), maybe the same.
        timeout_minutes: collectives that take longer end the run.
        shard_size: number of neighbouring DP × CP ranks that shard optimizer state; default: all of them.
        seed: dropout seed; pipeline stages, context- and data-parallel ranks draw different numbers.
    """
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=dims.tp,
        pipeline_model_parallel_size=dims.pp,
        context_parallel_size=dims.cp,
        virtual_pipeline_model_parallel_size=dims.vpp if dims.vpp > 1 else None,
        expert_model_parallel_size=dims.ep,
        expert_tensor_parallel_size=dims.expert_tp,
        distributed_timeout_minutes=timeout_minutes,
        # `tied` synchronises tied embeddings: megatron-core only knows copies on the first and last stage.
        get_embedding_ranks=lambda ranks, split=None: ranks[:1],
        create_gloo_process_groups=False,
    )
    coords, timeout = dims.coordinates(dist.get_rank()), timedelta(minutes=timeout_minutes)
    batch_part = coords.cp + dims.cp * coords.dp
    model_parallel_cuda_manual_seed(seed + 100 * coords.pp + 10_000 * batch_part, force_reset_rng=True)
    tied = _tied_group(dims, sorted(set(tied_owners)), timeout=timeout)
    collection = ProcessGroupCollection.use_mpu_process_groups()
    replica = collection.mp
    if dims.cp > 1:  # megatron-core's has the TP × PP ranks alone, over which it sums the gradient norm
        replica = _group_among([dims.replica_ranks(dp) for dp in range(dims.dp)], timeout=timeout)
    if shard_size is not None and shard_size < dims.dp_cp:
        _share_in_groups(collection, dims, shard_size, timeout=timeout)
    alone = _alone(dims, collection, timeout=timeout)
    return Groups(
        dims=dims,
        coords=coords,
        collection=collection,
        replica=replica,
        context=ContextGroups.of(dims, collection, alone, timeout=timeout),
        alone=alone,
        tied=tied,
    )


def _alone(dims: Dims, collection: ProcessGroupCollection, *, timeout: timedelta) -> dist.ProcessGroup:
    """Return a group of this rank only: one of those that are there, if any degree is 1."""
    for group in (collection.ep, collection.cp, collection.pp, collection.tp, collection.dp):
        if group.size() == 1:
            return group
    return _group_among([[rank] for rank in range(dims.world)], timeout=timeout)


def _share_in_groups(collection: ProcessGroupCollection, dims: Dims, size: int, *, timeout: timedelta) -> None:
    """Set the groups of HSDP in `collection`: each `size` neighbouring DP × CP ranks are a shard group.

    Ranks that hold the same shard are replicas of one another. megatron-core can make the same groups
    (`num_distributed_optimizer_instances`), but needs einops for it, which it does not require.
    """
    copies = dims.dp_cp // size
    ranks = np.arange(dims.world).reshape(dims.pp, copies, size, dims.tp)  # the last axis varies fastest
    shards = ranks.transpose(0, 1, 3, 2).reshape(-1, size)
    replicas = ranks.transpose(0, 2, 3, 1).reshape(-1, copies)
    instances = ranks.transpose(1, 0, 2, 3).reshape(copies, -1)  # all ranks that shard one copy
    collection.intra_dp_cp = collection.intra_expt_dp = _group_among(shards.tolist(), timeout=timeout)
    collection.inter_dist_opt = _group_among(replicas.tolist(), timeout=timeout)
    collection.intra_dist_opt = _group_among(instances.tolist(), timeout=timeout)


def _tied_group(dims: Dims, owners: list[int], *, timeout: timedelta) -> dist.ProcessGroup | None:
    """Return this rank's group of ranks with tied embeddings; None if it holds none, or if only one stage does.

    Every rank makes every group, as torch requires.
    """
    if len(owners) < 2:
        return None
    stage = dims.tp * dims.dp_cp
    columns = [[column + owner * stage for owner in owners] for column in range(stage)]
    made = [(ranks, dist.new_group(ranks, timeout=timeout)) for ranks in columns]
    return next((group for ranks, group in made if dist.get_rank() in ranks), None)


def encoder_groups(groups: Groups, *, tp: int, same_dropout: bool, seed: int, timeout_minutes: float) -> Groups:
    """Return the groups of a colocated encoder: TP over `tp` neighbouring ranks of a replica, DP over all others.

    Dropout draws different numbers on each rank; with `same_dropout`, the ranks of one encoder draw the same ones.
    Every rank of the world calls it.
    """
    alone, world = groups.alone, groups.collection.intra_dist_opt
    together, apart = alone, world
    if tp > 1:
        timeout = timedelta(minutes=timeout_minutes)
        encoders = groups.dims.encoders(tp)
        together = _group_among(encoders, timeout=timeout)
        apart = _group_among(list(zip(*encoders, strict=True)), timeout=timeout)  # ranks that hold the same shard
    collection = copy(groups.collection)
    for name in ("cp", "pp", "embd", "pos_embd", "ep", "expt_tp", "tp_ep", "tp_ep_pp"):
        setattr(collection, name, alone)
    for name in ("tp", "mp", "tp_cp"):
        setattr(collection, name, together)
    for name in ("dp", "dp_cp", "intra_dp_cp", "expt_dp", "intra_expt_dp"):
        setattr(collection, name, apart)
    collection.tp_dp_cp = world
    draws = dist.get_global_rank(together, 0) if same_dropout else dist.get_rank()
    get_cuda_rng_tracker().add(ENCODER_RNG, seed + 1_000_000 * (1 + draws))
    dims = Dims(tp=tp, pp=1, vpp=1, dp=groups.dims.world // tp)
    coords = Coordinates(tp=together.rank(), dp=apart.rank(), pp=0)
    context = ContextGroups(RowSplit(), alone, alone)
    return Groups(
        dims=dims, coords=coords, collection=collection, replica=together, context=context, alone=alone, tied=None
    )


def _group_among(candidates: Sequence[Sequence[int]], *, timeout: timedelta) -> dist.ProcessGroup:
    """Return the group that this rank is in. Every rank makes every group, as torch requires."""
    made = [(ranks, parallel_state.create_group(sorted(ranks), timeout=timeout)) for ranks in candidates]
    return next(group for ranks, group in made if dist.get_rank() in ranks)


@dataclass(frozen=True)
class Levels:
    """A group in two levels: the ranks of this rank's subgroup, and its counterparts in the other subgroups."""

    inside: dist.ProcessGroup
    across: dist.ProcessGroup


def levels_of(group: dist.ProcessGroup, size: int, *, timeout_minutes: float) -> Levels:
    """Return the two levels of a group that is cut into subgroups of `size` neighbours.

    Every rank of the world calls it, each with its own of groups that divide the world.
    """
    ranks: list[list[int]] = [[]] * dist.get_world_size()
    dist.all_gather_object(ranks, dist.get_process_group_ranks(group))
    groups = sorted({tuple(each) for each in ranks})
    timeout = timedelta(minutes=timeout_minutes)
    inside = [each[start : start + size] for each in groups for start in range(0, len(each), size)]
    across = [each[place::size] for each in groups for place in range(size)]
    return Levels(_group_among(inside, timeout=timeout), _group_among(across, timeout=timeout))


def destroy_groups() -> None:
    """Close the groups of a layout, so that the same processes can build another one; every rank calls it.

    megatron-core forgets its groups without closing them, and a gloo group keeps its threads and sockets until it is
    closed.
    """
    if not parallel_state.is_initialized():
        return
    made = [group for group in parallel_state._global_process_group_list or () if group is not None]
    parallel_state.destroy_model_parallel()
    dist.barrier()  # no rank may still wait in one of the groups
    for group in made:
        dist.destroy_process_group(group)
    gc.collect()


def broadcast_from_last_stage(tensor: torch.Tensor, groups: Groups) -> torch.Tensor:
    """Overwrite `tensor` on every pipeline stage with the last stage's values, and return it."""
    if groups.dims.pp > 1:
        dist.broadcast(tensor, src=dist.get_global_rank(groups.pp, groups.dims.pp - 1), group=groups.pp)
    return tensor


def random_states() -> dict[str, Any]:
    """Return the states of all random generators of this rank."""
    states: dict[str, Any] = {"cpu": torch.get_rng_state(), "tracker": get_cuda_rng_tracker().get_states()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def set_random_states(states: dict[str, Any]) -> None:
    """Set all random generators of this rank."""
    torch.set_rng_state(states["cpu"])
    get_cuda_rng_tracker().set_states(dict(states["tracker"]))  # a copy: the tracker changes it
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])
