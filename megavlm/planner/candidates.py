"""`Candidate`: one layout that the planner's search evaluates; `Space`: the values from which layouts are combined."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal

from megavlm.arch.dims import Dims, ScheduleName, with_dims
from megavlm.arch.scenario import Offloaded, Recompute, Sharding
from megavlm.config.schema import Config
from megavlm.rules.fields import value_at

_STAGES: tuple[Sharding, ...] = ("none", "optimizer", "optimizer_gradients", "full")  # of ZeRO

LEAST_PART = 16_384  # positions of a row per CP rank: with shorter parts, more replicas beat context parallelism


@dataclass(frozen=True)
class Space:
    """Values of each degree and option that a search combines into layouts."""

    tp: tuple[int, ...] = (1, 2, 4, 8)
    pp: tuple[int, ...] = tuple(range(1, 33))  # those that divide the ranks
    vpp: tuple[int, ...] = (1, 2, 4)
    schedule: tuple[ScheduleName, ...] = ("1f1b", "interleaved", "zb-h1")  # GPipe takes as long, and more memory
    micro_batch: tuple[int, ...] = (1, 2, 4, 8)
    recompute: tuple[Recompute, ...] = ("none", "selective", "full")
    placement: tuple[Literal["stages", "colocated"], ...] = ("stages", "colocated")
    sharding: tuple[Sharding, ...] = ("optimizer", "optimizer_gradients", "full")
    # Tried in this order where a layout lacks memory.
    offload: tuple[tuple[Offloaded, ...], ...] = (
        ("optimizer",),
        ("activations",),
        ("optimizer", "activations"),
        ("optimizer", "parameters"),  # with ZeRO-3 alone
        ("optimizer", "activations", "parameters"),
    )
    cp: tuple[int, ...] = (1, 2, 4, 8, 16)  # if there are several, those that leave a rank `LEAST_PART` positions
    ep: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128)  # of a mixture: those that divide its experts
    etp: tuple[int | None, ...] = ()  # of a mixture; (): TP and 1


# Options of a run that a search varies, by the field of `Space` that has their values.
_VARIED = {
    "tp": ("parallel", "tensor_model_parallel_size"),
    "pp": ("parallel", "pipeline_model_parallel_size"),
    "vpp": ("parallel", "virtual_pipeline_model_parallel_size"),
    "micro_batch": ("train", "micro_batch_size"),
    "recompute": ("execution", "recompute_granularity"),
    "placement": ("placement", "encoder"),
    "sharding": ("parallel", "data_parallel_sharding"),
    "cp": ("parallel", "context_parallel_size"),
    "ep": ("parallel", "expert_model_parallel_size"),
    "etp": ("parallel", "expert_tensor_parallel_size"),
}


def fixed(space: Space, config: Config, typed: Collection[tuple[str, ...]]) -> Space:
    """Return the space with the configured values of those options that a user `typed`."""
    return replace(space, **{name: (value_at(config, path),) for name, path in _VARIED.items() if path in typed})


@dataclass(frozen=True)
class Candidate:
    dims: Dims
    micro_batch: int
    recompute: Recompute
    placement: Literal["stages", "colocated"]
    sharding: Sharding
    vision_tp: int = 1  # of a colocated encoder
    offload: tuple[Offloaded, ...] = ()

    @property
    def label(self) -> str:
        degrees = " ".join(f"{name}{degree}" for name, degree in self.dims.degrees.items())
        placement = self.placement if self.vision_tp == 1 else f"{self.placement} (vision TP{self.vision_tp})"
        order = f" {self.dims.schedule}" if self.dims.schedule else ""
        return (
            f"{degrees}{order} mbs {self.micro_batch} recompute {self.recompute} "
            f"{placement} ZeRO-{_STAGES.index(self.sharding)}"
            + (f" offload {'+'.join(self.offload)}" if self.offload else "")
        )

    def applied(self, config: Config, cuts: tuple[int, ...] | None = None) -> Config:
        """Return the configuration with this layout."""
        config = with_dims(config, self.dims)
        parallel = replace(
            config.parallel,
            data_parallel_sharding=self.sharding,
            vision_tensor_model_parallel_size=self.vision_tp,
        )
        return replace(
            config,
            parallel=parallel,
            placement=replace(config.placement, encoder=self.placement, pipeline_cuts=cuts or None),
            execution=replace(config.execution, recompute_granularity=self.recompute, offload=self._offload(config)),
            train=replace(config.train, micro_batch_size=self.micro_batch),
        )

    def _offload(self, config: Config) -> tuple[str, ...]:
        """Return the values of `--offload`; tensors that the configuration keeps on a disk stay on the disk."""
        asked = {word.partition("=")[0]: word for word in config.execution.offload}
        return tuple(asked.get(kind, kind) for kind in self.offload)


def with_offload(candidate: Candidate, space: Space) -> Iterator[Candidate]:
    """Yield the candidate with each set of offloaded tensors in `space.offload` that contains more than its own set."""
    for more in space.offload:
        if set(more) > set(candidate.offload):
            yield replace(candidate, offload=more)


def candidates(
    world: int, space: Space, *, length: int, vision_tp: int = 1, offload: tuple[Offloaded, ...] = (), experts: int = 0
) -> Iterator[Candidate]:
    """Yield every layout of `world` ranks in a space. `length`: positions of a row; `vision_tp`: TP degree of colocated
    encoders; `offload`: tensors that are offloaded in any case; `experts`: number of experts (0: dense).
    """
    # ZeRO-2 and 3 shard over all replicas, but only some of them hold the same experts.
    kinds = tuple(kind for kind in space.sharding if not experts or kind in ("optimizer", "none")) or space.sharding
    for dims in _degrees(world, space, length=length, experts=experts):
        for micro_batch in space.micro_batch:
            for placement in space.placement:
                for recompute in space.recompute:
                    shared = vision_tp if placement == "colocated" else 1
                    for sharding in kinds if dims.dp_cp > 1 else kinds[:1]:
                        yield Candidate(dims, micro_batch, recompute, placement, sharding, shared, offload)


def _degrees(world: int, space: Space, *, length: int, experts: int) -> Iterator[Dims]:
    for tp, cp, pp in product(space.tp, space.cp, space.pp):
        if world % (tp * cp * pp) == 0 and (cp == 1 or length >= cp * LEAST_PART or len(space.cp) == 1):
            for vpp, schedule in _orders(pp, space):
                for ep, etp in _of_experts(world // pp, tp, space, experts):
                    yield Dims(tp, pp, vpp, world // (tp * cp * pp), cp, ep=ep, etp=etp, schedule=schedule)


def _orders(pp: int, space: Space) -> Iterator[tuple[int, ScheduleName | None]]:
    """Yield (VPP, schedule) for `pp` stages; None is the default schedule. A single stage counts as 1F1B."""
    if pp == 1:
        yield from [(1, None)] * ("1f1b" in space.schedule and 1 in space.vpp)
        return
    for vpp in space.vpp:
        if vpp > 1 and "interleaved" in space.schedule:
            yield vpp, None
        elif vpp == 1:
            yield from ((1, None if name == "1f1b" else name) for name in space.schedule if name != "interleaved")


def _of_experts(stage: int, tp: int, space: Space, experts: int) -> Iterator[tuple[int, int | None]]:
    """Yield (EP, ETP) for the `stage` ranks of a pipeline stage; ETP None is its default, else it is TP or 1."""
    for ep in space.ep if experts else (1,):
        usual = (None, tp if ep > 1 else 1) if experts and tp > 1 else (None,)
        for etp in space.etp or usual:
            if experts % ep == 0 and stage % (ep * (etp or 1)) == 0:
                yield ep, etp
