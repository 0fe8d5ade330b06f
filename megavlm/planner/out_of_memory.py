"""Explain an out-of-memory error: the estimated peak by component, and the nearest setting that is estimated to fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from megavlm.arch.dims import Dims
from megavlm.config.derived import offloaded
from megavlm.config.messages import several
from megavlm.config.rules import check
from megavlm.config.schema import Config
from megavlm.errors import UserError
from megavlm.planner.auto import device_of, memory_of, predict
from megavlm.planner.hardware import Hardware, profile
from megavlm.planner.memory import Memory

_SAVED = 0.9  # where the estimate says that the run fits, it was too low: a remedy must then save a tenth of it
Estimate = Callable[[Config], Memory]  # of the fullest rank


def explain(config: Config, dims: Dims, *, rank: int, on_gpu: bool, capacity: float | None) -> str:
    """Return one line on a run that ended out of memory on `rank`; `capacity` are the bytes of a device, if known."""

    def estimate(changed: Config) -> Memory:
        return max(memory_of(changed, dims, on_gpu=on_gpu), key=lambda memory: memory.total)

    return line(config, dims, estimate, rank=rank, capacity=capacity)


def verdict(config: Config, dims: Dims, *, on_gpu: bool) -> str | None:
    """Return a line on whether the layout is estimated to fit on `--hardware`; None on CPUs, whose memory varies."""
    name = device_of(config, on_gpu=on_gpu)
    hardware = profile(name)
    if not hardware.on_gpu:
        return None
    if (problem := complaint(config, dims, hardware, name=name)) is not None:
        return f"does not fit: {problem}"
    needed = max(each.total for each in predict(config, dims, hardware).memory)
    ranks = several(dims.world, "rank")
    return f"fits: {_gib(needed)} of {_gib(hardware.memory)} on the fullest of {ranks} ({name})"


def complaint(config: Config, dims: Dims, hardware: Hardware, *, name: str) -> str | None:
    """Return a line if the planner estimates that a rank needs more memory than the GPU has, else None."""

    def fullest(changed: Config) -> float:
        return max(each.total for each in predict(changed, dims, hardware).memory)

    if (needed := fullest(config)) <= hardware.memory:
        return None
    return (
        f"the layout is estimated to need {_gib(needed)} on its fullest rank, more than the {_gib(hardware.memory)} "
        f"that tensors may take on {name}: {remedy(config, dims, fullest, limit=hardware.memory)}"
    )


def line(config: Config, dims: Dims, estimate: Estimate, *, rank: int, capacity: float | None) -> str:
    """Return the line of `explain` for an estimate."""
    now = estimate(config)
    parts = sorted(vars(now).items(), key=lambda part: -part[1])
    peak = ", ".join(f"{name} {_gib(size)}" for name, size in parts if size)
    holds = "" if capacity is None else f" of {_gib(capacity)}"
    text = f"out of memory on rank {rank}: the planner estimates a peak of {_gib(now.total)}{holds} ({peak})"
    limit = min(_SAVED * now.total, capacity if capacity is not None else float("inf"))
    return f"{text}: {remedy(config, dims, lambda changed: estimate(changed).total, limit=limit)}"


def remedy(config: Config, dims: Dims, fullest: Callable[[Config], float], *, limit: float) -> str:
    """Return words on the first setting of `settings` with which the fullest rank takes at most `limit` bytes."""
    for words, changed in settings(config, dims):
        try:
            check(changed, world=dims.world)
            after = fullest(changed)
        except UserError:
            continue
        if after <= limit:
            return f"use {words}, with which it estimates {_gib(after)}"
    return "no single setting fits, so use more devices, and let --plan auto choose the layout"


def settings(config: Config, dims: Dims) -> Iterator[tuple[str, Config]]:
    """Yield settings that take less memory on the same devices, those that cost the least time first."""
    execution, train, parallel = config.execution, config.train, config.parallel
    size = train.micro_batch_size
    while size > 1:
        size //= 2
        yield f"--micro-batch-size {size}", replace(config, train=replace(train, micro_batch_size=size))
    for kind in ("optimizer", "optimizer_gradients", "full"):
        if dims.dp_cp > 1 and kind != parallel.data_parallel_sharding:
            sharded = replace(config, parallel=replace(parallel, data_parallel_sharding=kind))
            yield f"--data-parallel-sharding {kind}", sharded
    for what in ("activations", "optimizer"):
        if what not in offloaded(config):
            offload = (*execution.offload, what)
            yield f"--offload {' '.join(offload)}", replace(config, execution=replace(execution, offload=offload))
    more = tuple(what for what in ("optimizer", "parameters") if what not in offloaded(config))
    if parallel.data_parallel_sharding == "full" and "parameters" in more:
        offload = (*execution.offload, *more)
        yield f"--offload {' '.join(offload)}", replace(config, execution=replace(execution, offload=offload))
    if execution.recompute_granularity != "full":
        full = replace(config, execution=replace(execution, recompute_granularity="full"))
        yield "--recompute-granularity full", full


def _gib(size: float) -> str:
    return f"{size / 2**30:.2f} GiB"
