"""Parallel degrees, and the arithmetic of ranks, replicas and pipeline chunks. Without torch.

Ranks are laid out as megatron-core does ("tp-cp-ep-dp-pp"): TP varies fastest, then CP, DP and PP, so the ranks of
a tensor-parallel group are neighbours (one node) and pipeline neighbours are furthest apart.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from megavlm.arch.tensor_split import context_heads
from megavlm.config.derived import expert_tensor_parallel
from megavlm.config.schema import Config

ScheduleName = Literal["1f1b", "interleaved", "gpipe", "zb-h1"]


@dataclass(frozen=True)
class RowSplit:
    """How the rows of a batch are sharded over context-parallel ranks.

    Ranks form `groups` groups of `heads` neighbouring ranks: rank h + heads·g is number h of group g. The ranks of a
    group exchange heads, and groups gather one another's keys and values. A single group has whole rows, and each of
    its ranks a run of equally many positions. Later positions attend to more keys, so with several groups each group
    has two of the 2·groups runs of a row: the g-th from the beginning and the g-th from the end (zig-zag; Llama 3,
    Grattafiori et al. 2024).
    """

    heads: int = 1
    groups: int = 1

    @property
    def ranks(self) -> int:
        """Return the number of context-parallel ranks."""
        return self.heads * self.groups

    @property
    def runs(self) -> int:
        """Return the number of runs into which a row is cut."""
        return 2 * self.groups if self.groups > 1 else 1

    @property
    def multiple(self) -> int:
        """Return the number that must divide the positions of a row."""
        return math.lcm(self.ranks, self.runs)


@dataclass(frozen=True)
class Dims:
    """Parallel degrees of a run. It has tp · cp · dp · pp ranks; `vpp` multiplies chunks, not ranks."""

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    dp: int = 1
    cp: int = 1
    cp_groups: int = 1  # `RowSplit.groups`
    ep: int = 1  # experts are spread over EP × ETP neighbouring ranks of a pipeline stage
    etp: int | None = None  # None: the default, `expert_tp`
    schedule: ScheduleName | None = None  # None: the default, `order`

    @property
    def order(self) -> ScheduleName:
        """Return the pipeline schedule. The default is interleaved 1F1B if ranks have several chunks, else 1F1B."""
        default: ScheduleName = "interleaved" if self.vpp > 1 and self.pp > 1 else "1f1b"
        return self.schedule or default

    @property
    def row_split(self) -> RowSplit:
        """Return how context-parallel ranks shard rows."""
        return RowSplit(heads=self.cp // self.cp_groups, groups=self.cp_groups)

    @property
    def degrees(self) -> dict[str, int]:
        """Return the degrees by their names in tables. CP, EP and ETP are left out at their defaults."""
        context = {"CP": self.cp} if self.cp > 1 else {}
        experts = {"EP": self.ep} if self.ep > 1 else {}
        if self.etp is not None:
            experts["ETP"] = self.etp
        return {"TP": self.tp, **context, "PP": self.pp, "VPP": self.vpp, "DP": self.dp, **experts}

    @property
    def world(self) -> int:
        """Return the number of ranks of the run."""
        return self.replica * self.dp

    @property
    def replica(self) -> int:
        """Return the number of ranks of a model replica."""
        return self.tp * self.cp * self.pp

    @property
    def dp_cp(self) -> int:
        """Return the number of ranks that hold the same parameters and sum their gradients."""
        return self.dp * self.cp

    @property
    def expert_tp(self) -> int:
        """Return the number of ranks that each expert is sharded over: ETP; by default TP if EP is 1, else 1."""
        if self.etp is not None:
            return self.etp
        return self.tp if self.ep == 1 else 1

    @property
    def expert_dp(self) -> int:
        """Return the number of ranks that hold the same experts and sum their gradients."""
        return self.tp * self.dp_cp // (self.expert_tp * self.ep)

    @property
    def chunks(self) -> int:
        """Return the number of chunks of the whole pipeline."""
        return self.pp * self.vpp

    def coordinates(self, rank: int) -> Coordinates:
        """Return the coordinates of a global rank: rank = tp + TP·(cp + CP·(dp + DP·pp))."""
        return Coordinates(
            tp=rank % self.tp,
            cp=rank // self.tp % self.cp,
            dp=rank // (self.tp * self.cp) % self.dp,
            pp=rank // (self.tp * self.cp * self.dp),
        )

    def replica_ranks(self, dp: int) -> tuple[int, ...]:
        """Return the global ranks of a model replica, ordered by tp + TP·(cp + CP·pp)."""
        together = self.tp * self.cp
        return tuple(rank + together * (dp + self.dp * pp) for pp in range(self.pp) for rank in range(together))

    def encoders(self, width: int) -> tuple[tuple[int, ...], ...]:
        """Return the global ranks of each colocated encoder: `width` neighbouring ranks of a replica."""
        replicas = [self.replica_ranks(dp) for dp in range(self.dp)]
        return tuple(replica[first : first + width] for replica in replicas for first in range(0, len(replica), width))

    def chunks_of(self, pp_rank: int) -> tuple[int, ...]:
        """Return the chunks that a pipeline rank owns, in execution order: r, r+PP, r+2·PP, …"""
        return tuple(range(pp_rank, self.chunks, self.pp))

    def owner_of(self, chunk: int) -> int:
        """Return the pipeline rank that owns a chunk."""
        return chunk % self.pp


@dataclass(frozen=True)
class Coordinates:
    """Place of a rank in each parallel dimension."""

    tp: int
    dp: int
    pp: int
    cp: int = 0


def dims_of(config: Config, *, world: int) -> Dims:
    """Return the degrees of a layout on `world` ranks: DP is world / (TP · CP · PP)."""
    parallel = config.parallel
    dims = Dims(
        tp=parallel.tensor_model_parallel_size,
        cp=parallel.context_parallel_size,
        cp_groups=parallel.context_parallel_size // context_heads(config),
        pp=parallel.pipeline_model_parallel_size,
        vpp=parallel.virtual_pipeline_model_parallel_size,
        ep=parallel.expert_model_parallel_size,
    )
    if expert_tensor_parallel(config) != dims.expert_tp:
        dims = replace(dims, etp=expert_tensor_parallel(config))
    if parallel.schedule not in (None, dims.order):
        dims = replace(dims, schedule=parallel.schedule)
    assert world % dims.replica == 0, "rules refuse other numbers of processes"
    return replace(dims, dp=world // dims.replica)


def with_dims(config: Config, dims: Dims) -> Config:
    """Return the configuration with the degrees of a layout."""
    parallel = replace(
        config.parallel,
        tensor_model_parallel_size=dims.tp,
        context_parallel_size=dims.cp,
        pipeline_model_parallel_size=dims.pp,
        virtual_pipeline_model_parallel_size=dims.vpp,
        schedule=dims.schedule,
        expert_model_parallel_size=dims.ep,
        expert_tensor_parallel_size=dims.etp,
    )
    return replace(config, parallel=parallel)
