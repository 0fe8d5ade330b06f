"""Create the process groups of a parallel layout; no other file uses megatron-core's `parallel_state`."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, model_parallel_cuda_manual_seed

from megavlm.arch.dims import Coordinates, Dims, RowSplit
from megavlm.backend.patches import groups_of_members
from megavlm.parallel.rendezvous import TorchWorld, barrier

ENCODER_RNG = "encoder-rng"  # name of a colocated encoder's dropout generator in megatron-core's tracker


# megatron-core's groups without a collective in them; of the last two the optimizer asks the size.
_UNUSED = {
    "TENSOR_AND_DATA_PARALLEL_GROUP",
    "MODEL_PARALLEL_GROUP",
    "EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP",
}


@dataclass(frozen=True)
class UnusedGroup:
    """Placeholder for a process group without communication in this layout; torch refuses it in a collective."""

    name: str
    ranks: tuple[int, ...] = field(repr=False)

    def size(self) -> int:
        return len(self.ranks)

    def rank(self) -> int:
        return self.ranks.index(dist.get_rank())


class GroupMaker:
    """Creates only the process groups that this rank belongs to; equal sets of ranks share one group.

    By default, all ranks call torch's `new_group` for every group, and the number of calls grows with the world: 3,185
    calls at TP8·PP8 on 1,024 ranks. With `use_local_synchronization` only members call it. The members of a group
    rendezvous under a key of the ranks and the number of groups that a member has made before, so that all ranks must
    make or skip each kind of group in the same order.
    """

    def __init__(self, timeout: timedelta) -> None:
        self._timeout = timeout
        self._made: dict[tuple[int, ...], dist.ProcessGroup] = {}

    def of(self, ranks: Sequence[int]) -> dist.ProcessGroup:
        """Return the process group of `ranks`, which include this rank; create it at the first call."""
        key = tuple(sorted(map(int, ranks)))
        if key not in self._made:
            self._made[key] = dist.new_group(list(key), timeout=self._timeout, use_local_synchronization=True)
        return self._made[key]

    def on_host(self, group: dist.ProcessGroup) -> dist.ProcessGroup:
        """Return a group of the same ranks for tensors on the host: `group` itself if possible, or a new gloo group."""
        if group.size() == 1 or dist.get_backend(group) == "gloo":
            return group
        ranks = dist.get_process_group_ranks(group)
        return dist.new_group(ranks, timeout=self._timeout, backend="gloo", use_local_synchronization=True)

    def skip(self) -> None:
        """Create a group of this rank alone while other ranks create one, so that all have created equally many."""
        dist.new_group([dist.get_rank()], timeout=self._timeout, use_local_synchronization=True)

    def among(self, rows: np.ndarray) -> dist.ProcessGroup:
        """Return the group of the row of ranks that contains this rank; each rank of the world is in one row."""
        return self.of(rows[(rows == dist.get_rank()).any(axis=1)][0].tolist())


@dataclass(frozen=True)
class ContextGroups:
    """Process groups of context parallelism: for the all-to-all of heads, and for gathering keys and values."""

    split: RowSplit
    heads: dist.ProcessGroup
    keys: dist.ProcessGroup  # this rank's number in it is the number of the heads group whose keys this rank has

    @classmethod
    def of(
        cls, dims: Dims, collection: ProcessGroupCollection, alone: dist.ProcessGroup, maker: GroupMaker
    ) -> ContextGroups:
        """Create the groups on every rank. `alone` is a group of this rank only."""
        split = dims.row_split
        if split.groups == 1:
            return cls(split, collection.cp, alone)
        if split.heads == 1:
            return cls(split, alone, collection.cp)
        ranks = np.arange(dims.world).reshape(-1, split.groups, split.heads, dims.tp)
        heads = ranks.transpose(0, 1, 3, 2).reshape(-1, split.heads)
        keys = ranks.transpose(0, 2, 3, 1).reshape(-1, split.groups)
        return cls(split, maker.among(heads), maker.among(keys))


@dataclass(frozen=True)
class Groups:
    """Process groups that this rank belongs to; `collection` holds them as megatron-core's modules expect them."""

    dims: Dims
    coords: Coordinates
    collection: ProcessGroupCollection
    replica: dist.ProcessGroup  # the TP × CP × PP ranks of this rank's model replica, in the order of `replica_rank`
    context: ContextGroups
    alone: dist.ProcessGroup  # this rank only
    tied: dist.ProcessGroup | None  # the two ranks that hold a copy of tied embeddings, if two stages do
    maker: GroupMaker

    @property
    def tp(self) -> dist.ProcessGroup:
        return self.collection.tp

    @property
    def pp(self) -> dist.ProcessGroup:
        return self.collection.pp

    @property
    def dp(self) -> dist.ProcessGroup:
        """Return the data-parallel group: the ranks of all replicas with this rank's TP, CP and PP coordinates."""
        return self.collection.dp

    @property
    def dp_cp(self) -> dist.ProcessGroup:
        """Return the group of DP × CP ranks, which hold the same parameters and sum their gradients."""
        return self.collection.dp_cp

    @property
    def shard(self) -> dist.ProcessGroup:
        """Return the group that shards optimizer state (and more): all DP × CP ranks, or some of them with HSDP."""
        return self.collection.intra_dp_cp

    @property
    def replicas(self) -> dist.ProcessGroup | None:
        """Return the HSDP replica group: ranks of all shard groups with the same shard; None without HSDP."""
        return self.collection.inter_dist_opt if self.shard.size() < self.dp_cp.size() else None

    @property
    def replica_rank(self) -> int:
        """Return this rank's index in its model replica: tp + TP·(cp + CP·pp)."""
        return self.coords.tp + self.dims.tp * (self.coords.cp + self.dims.cp * self.coords.pp)

    @property
    def is_first_tp(self) -> bool:
        """Return whether this is tensor-parallel rank 0, which writes and counts values equal on all TP ranks."""
        return self.coords.tp == 0

    @property
    def is_reader(self) -> bool:
        """Return whether this rank reads the samples of its replica and records the skipped samples."""
        return self.replica_rank == 0


def build_groups(
    dims: Dims,
    *,
    tied_owners: tuple[int, ...],
    seed: int,
    timeout_minutes: float,
    shard_size: int | None = None,
    encoder_tp: int = 1,
) -> Groups:
    """Create every process group of a layout and seed the dropout generators; return this rank's groups.

    Args:
        tied_owners: pipeline ranks with tied embeddings (first language stage and last stage), possibly equal.
        timeout_minutes: collectives that take longer end the run.
        shard_size: number of neighbouring DP × CP ranks that shard optimizer state; default: all of them.
        encoder_tp: tensor-parallel degree of a colocated encoder, if the layout has one (`encoder_groups`).
        seed: dropout seed; pipeline stages, context- and data-parallel ranks draw different numbers.
    """
    maker = GroupMaker(timedelta(minutes=timeout_minutes))
    alone = maker.of([dist.get_rank()])

    def used(ranks: Sequence[int], name: str) -> Any:
        return UnusedGroup(name, tuple(ranks)) if name in _UNUSED else maker.of(ranks)

    with groups_of_members(parallel_state, used):
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
    coords = dims.coordinates(dist.get_rank())
    batch_part = coords.cp + dims.cp * coords.dp
    model_parallel_cuda_manual_seed(seed + 100 * coords.pp + 10_000 * batch_part, force_reset_rng=True)
    collection = ProcessGroupCollection.use_mpu_process_groups()
    replica = maker.of(dims.replica_ranks(coords.dp))
    if shard_size is not None and shard_size < dims.dp_cp:
        _share_in_groups(collection, dims, shard_size, maker)
    context = ContextGroups.of(dims, collection, alone, maker)
    if encoder_tp > 1:
        _encoder_groups(dims, encoder_tp, maker)
    return Groups(
        dims=dims,
        coords=coords,
        collection=collection,
        replica=replica,
        context=context,
        alone=alone,
        tied=_tied_group(dims, sorted(set(tied_owners)), maker),
        maker=maker,
    )


def _share_in_groups(collection: ProcessGroupCollection, dims: Dims, size: int, maker: GroupMaker) -> None:
    """Set the groups of HSDP in `collection`: each `size` neighbouring DP × CP ranks are a shard group.

    Ranks that hold the same shard are a replica group. megatron-core can create the same groups
    (`num_distributed_optimizer_instances`), but needs einops for that, which is not among its dependencies.
    """
    copies = dims.dp_cp // size
    ranks = np.arange(dims.world).reshape(dims.pp, copies, size, dims.tp)  # the last axis varies fastest
    shards = ranks.transpose(0, 1, 3, 2).reshape(-1, size)
    replicas = ranks.transpose(0, 2, 3, 1).reshape(-1, copies)
    collection.intra_dp_cp = collection.intra_expt_dp = maker.among(shards)
    collection.inter_dist_opt = maker.among(replicas)
    own = ranks[:, collection.inter_dist_opt.rank()]  # all ranks that shard one copy
    collection.intra_dist_opt = UnusedGroup("OF_A_COPY", tuple(own.flatten().tolist()))


def _tied_group(dims: Dims, owners: list[int], maker: GroupMaker) -> dist.ProcessGroup | None:
    """Return this rank's tied-embedding group; None if it has no tied embeddings, or if only one stage has them."""
    stage = dims.tp * dims.dp_cp
    owner, column = divmod(dist.get_rank(), stage)
    if len(owners) < 2:
        return None
    if owner not in owners:
        maker.skip()
        return None
    return maker.of([column + each * stage for each in owners])


def _encoder_groups(dims: Dims, tp: int, maker: GroupMaker) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Return the TP group of this rank's colocated encoder, and the DP group of ranks with the same encoder shard."""
    encoders = np.array(dims.encoders(tp))
    return maker.among(encoders), maker.among(encoders.T)


def encoder_groups(groups: Groups, *, tp: int, same_dropout: bool, seed: int) -> Groups:
    """Return the groups of a colocated encoder: TP over `tp` neighbouring ranks of a replica, DP across the encoders.

    Dropout draws different numbers on each rank; with `same_dropout`, the ranks of one encoder draw the same numbers.
    `tp` must equal the `encoder_tp` that was passed to `build_groups`.
    """
    alone, world = groups.alone, groups.maker.of(range(groups.dims.world))
    together, apart = _encoder_groups(groups.dims, tp, groups.maker) if tp > 1 else (alone, world)
    collection = copy(groups.collection)
    for name in ("cp", "pp", "embd", "pos_embd", "ep", "expt_tp", "tp_ep", "tp_ep_pp"):
        setattr(collection, name, alone)
    for name in ("tp", "mp", "tp_cp"):
        setattr(collection, name, together)
    for name in ("dp", "dp_cp", "intra_dp_cp", "expt_dp", "intra_expt_dp"):
        setattr(collection, name, apart)
    collection.tp_dp_cp = collection.intra_dist_opt = world
    draws = dist.get_global_rank(together, 0) if same_dropout else dist.get_rank()
    get_cuda_rng_tracker().add(ENCODER_RNG, seed + 1_000_000 * (1 + draws))
    dims = Dims(tp=tp, pp=1, vpp=1, dp=groups.dims.world // tp)
    coords = Coordinates(tp=together.rank(), dp=apart.rank(), pp=0)
    context = ContextGroups(RowSplit(), alone, alone)
    return Groups(
        dims=dims,
        coords=coords,
        collection=collection,
        replica=together,
        context=context,
        alone=alone,
        tied=None,
        maker=groups.maker,
    )


@dataclass(frozen=True)
class Levels:
    """Two levels of a process group: this rank's subgroup, and the ranks at the same position in all subgroups."""

    inside: dist.ProcessGroup
    across: dist.ProcessGroup


def levels_of(group: dist.ProcessGroup, size: int | None, maker: GroupMaker) -> Levels | None:
    """Divide a group of one stage into subgroups of `size` neighbours, and return the two levels; None without a size
    or if a subgroup would have one rank.
    """
    if size is None or size == 1:
        return None
    ranks = np.array(dist.get_process_group_ranks(group)).reshape(-1, size)
    return Levels(maker.among(ranks), maker.among(ranks.T))


def destroy_groups() -> None:
    """Close all process groups of a layout, so that the same processes can build another layout; all ranks call it.

    megatron-core drops its groups without closing them, and a gloo group keeps its threads and sockets until it is
    closed.
    """
    if not parallel_state.is_initialized():
        return
    parallel_state.destroy_model_parallel()
    barrier()  # no rank may still wait in one of the groups
    dist.destroy_process_group()
    if TorchWorld.current is not None:
        TorchWorld.current.begin()
    gc.collect()


def broadcast_from_last_stage(tensor: torch.Tensor, groups: Groups) -> torch.Tensor:
    """Overwrite `tensor` on every pipeline stage with the last stage's values, and return it."""
    if groups.dims.pp > 1:
        dist.broadcast(tensor, src=dist.get_global_rank(groups.pp, groups.dims.pp - 1), group=groups.pp)
    return tensor


def random_states() -> dict[str, Any]:
    """Return the states of this rank's torch and megatron-core random generators."""
    states: dict[str, Any] = {"cpu": torch.get_rng_state(), "tracker": get_cuda_rng_tracker().get_states()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def set_random_states(states: dict[str, Any]) -> None:
    """Restore the random generators of this rank from `random_states`."""
    torch.set_rng_state(states["cpu"])
    get_cuda_rng_tracker().set_states(dict(states["tracker"]))  # a copy: the tracker changes it
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])
