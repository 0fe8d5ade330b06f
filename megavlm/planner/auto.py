"""The planner's answers for one configuration: `--plan auto`, `--dry-run`, and advice when memory runs out.

The seconds of a run's start, which a dry run prints, grow with the model and the number of ranks by a formula; comments
give the sources of its constants. The constants of CPUs are from two processes of the demo on two cores, which took
4.2 s (2026-11-26; `benchmarks/start.py` measures the parts); those of GPUs are unconfirmed estimates. First-time
indexing of data sets and downloads are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from itertools import accumulate

from megavlm.arch.dims import Dims
from megavlm.arch.kinds import model_parameters
from megavlm.arch.layers import layer_names
from megavlm.arch.plan import make_plan
from megavlm.arch.scenario import scenario_of
from megavlm.arch.workload import typical_images
from megavlm.config.derived import offloaded
from megavlm.config.messages import several
from megavlm.config.schema import Config
from megavlm.errors import UserError
from megavlm.planner.candidates import Space
from megavlm.planner.hardware import HOST_USABLE, Hardware, device_here, for_precision, profile, profile_of_device
from megavlm.planner.host_memory import node_memory_error
from megavlm.planner.layer_profiles import layer_profiles
from megavlm.planner.memory import Memory
from megavlm.planner.search import search
from megavlm.planner.step_time import StepEstimate, colocated_encoder, encoder_layers, step_of
from megavlm.program import program
from megavlm.resilience.phases import PARTS
from megavlm.rules.check import check
from megavlm.rules.defaults import resolve, starts_from_weights


def planned(
    config: Config, world: int, *, vocab_size: int | None = None, typed: Collection[tuple[str, ...]] = ()
) -> Config:
    """Return the configuration with the fastest layout of `world` processes that a search finds, for `--plan auto`.
    The layout offloads more than the configuration says only if no layout can run otherwise. Options that the user
    `typed`, by their paths, keep their values.

    Raises UserError if no layout can run, with the most frequent reason.
    """
    if config.placement.plan != "auto":
        return config
    run = resolve(config, vocab_size=vocab_size)
    if config.placement.hardware is None and (here := device_here()) and profile_of_device(here) is None:
        raise UserError(
            f"--plan auto has no profile of {here}: name a GPU like it by --hardware, as h100, or a file of "
            f"{program('calibrate')}"
        )
    hardware = profile(name := device_of(run))
    outcome = search(run, world, hardware, space=Space(offload=()), typed=typed, top=1)
    if not outcome.best:
        outcome = search(run, world, hardware, typed=typed, top=1)
    if not outcome.best:
        reasons = [each.reason for each in outcome.rejected]
        common = max(reasons, key=reasons.count)
        raise UserError(f"--plan auto finds no layout of {world} processes that can run: {common}")
    found = outcome.config(config)  # RUN_DIR/config.yaml stores a fixed layout: restarts do not search
    return replace(found, placement=replace(found.placement, plan="manual", hardware=name))


def predict(config: Config, dims: Dims, hardware: Hardware) -> StepEstimate:
    """Return the estimate of one step of the configured layout, with the pipeline cuts that the run would use."""
    hardware = for_precision(hardware, config.precision.dtype)
    plan, scenario = make_plan(config, dims), scenario_of(config, dims, on_gpu=hardware.on_gpu)
    first = encoder_layers(scenario) if plan.placement == "colocated" else 0
    cuts = tuple(accumulate(len(names) for names in plan.chunks))[:-1]
    profiles = layer_profiles(scenario, hardware, recompute=config.execution.recompute_granularity, first=first)
    encoder = None
    if first:
        images = typical_images(config) * config.train.micro_batch_size
        encoder = colocated_encoder(scenario, hardware=hardware, config=config, images=images, vision_tp=plan.vision_tp)
    return step_of(profiles, hardware, cuts, encoder=encoder)


def memory_of(config: Config, dims: Dims, *, on_gpu: bool) -> tuple[Memory, ...]:
    """Return the predicted peak memory of each pipeline rank of the configured layout."""
    return predict(config, dims, profile(_profile(on_gpu))).memory


def offload_memory_error(config: Config, dims: Dims, *, node_memory: float, devices: int) -> str | None:
    """Return an error message if offloading needs more than the `node_memory` bytes of a node with `devices` GPUs, else
    None.
    """
    hardware = profile("h100")
    spare = replace(hardware.own_host, memory=HOST_USABLE * node_memory)
    hardware = replace(hardware, devices_per_node=devices, host=spare)
    host = predict(config, dims, hardware).host
    return node_memory_error(host, dims.world, hardware) if host else None


def device_of(config: Config) -> str:
    """Return the hardware profile to assume: --hardware, else that of this machine's GPU (h100 if that has none);
    without a GPU h100, but cpu in fp32.
    """
    if (given := config.placement.hardware) is not None:
        return given
    found = profile_of_device(here := device_here() or "")
    return found.name if found else _profile(bool(here) or config.precision.dtype != "fp32")


def _profile(on_gpu: bool) -> str:
    return "h100" if on_gpu else "cpu"


_SAVED = 0.9  # an estimate by which the run fits was too low: a remedy must then save a tenth of the estimate


def explain(config: Config, dims: Dims, *, rank: int, on_gpu: bool, capacity: float | None) -> str:
    """Return a line that explains why `rank` ran out of memory and suggests a setting; `capacity`: device bytes."""

    def estimate(changed: Config) -> Memory:
        return max(memory_of(changed, dims, on_gpu=on_gpu), key=lambda memory: memory.total)

    now = estimate(config)
    parts = sorted(vars(now).items(), key=lambda part: -part[1])
    peak = ", ".join(f"{name} {_gib(size)}" for name, size in parts if size)
    holds = "" if capacity is None else f" of {_gib(capacity)}"
    text = f"out of memory on rank {rank}: the planner estimates a peak of {_gib(now.total)}{holds} ({peak})"
    limit = min(_SAVED * now.total, capacity if capacity is not None else float("inf"))
    return f"{text}: {remedy(config, dims, lambda changed: estimate(changed).total, limit=limit)}"


def verdict(config: Config, dims: Dims, hardware: Hardware, peak: float, *, name: str) -> str | None:
    """Return a line that says whether the layout fits a GPU, given the `peak` bytes of the fullest rank; None on CPUs,
    because their memory varies.
    """
    if not hardware.on_gpu:
        return None
    if (problem := complaint(config, dims, hardware, name=name)) is not None:
        return f"does not fit: {problem}"
    ranks = several(dims.world, "rank")
    return f"fits: {_gib(peak)} of {_gib(hardware.memory)} on the fullest of {ranks} ({name})"


def complaint(config: Config, dims: Dims, hardware: Hardware, *, name: str) -> str | None:
    """Return an error message if the planner estimates that a rank needs more memory than the GPU has, else None."""

    def fullest(changed: Config) -> float:
        return max(each.total for each in predict(changed, dims, hardware).memory)

    if (needed := fullest(config)) <= hardware.memory:
        return None
    return (
        f"the layout is estimated to need {_gib(needed)} on its fullest rank, more than the {_gib(hardware.memory)} "
        f"that tensors may take on {name}: {remedy(config, dims, fullest, limit=hardware.memory)}"
    )


def remedy(config: Config, dims: Dims, fullest: Callable[[Config], float], *, limit: float) -> str:
    """Return advice to use the first of `settings` with which the fullest rank needs at most `limit` bytes."""
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
    """Yield (options, changed configuration) that need less memory on the same devices, the cheapest in time first."""
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


# Seconds, on CPUs and on GPUs. All are estimates; those of CPUs add up to the starts that were measured.
_IMPORTS = {False: 2.9, True: 10.0}  # on GPUs CUDA's context and Transformer Engine come on top
_MEETING = {False: 0.1, True: 0.5}
_PER_RANK = 1e-3  # of the meeting: one store answers all ranks, one after the other. Estimate
_PER_GROUP = {False: 0.01, True: 0.3}  # NCCL makes a communicator
_DATA = 0.1  # tokenizer and loaders of the demo; estimate
_OUTPUTS = 0.5  # TensorBoard and the first samples; estimate
_FIRST_BATCH = 0.05  # of the demo; workers import and read files while the model is built
_WARM_UP = {False: 0.3, True: 10.0}  # of the first step: kernels are loaded and chosen
_DRAWN = 1e8  # parameters per second that a process draws from the seed: estimate; torch.randn made 1.4e8 in a thread
_LEAST = 0.05  # smaller shares are not printed


def start_estimate(
    config: Config, dims: Dims, hardware: Hardware, step: float, *, resumes: bool
) -> Mapping[str, float]:
    """Return the seconds of each part of a start, by its name in `PARTS`; `step`: seconds of a later training step."""
    on_gpu = hardware.on_gpu
    parameters = sum(model_parameters(name, config.model) for name in layer_names(config.model)) / dims.pp
    given = resumes or starts_from_weights(config)
    axes = sum(size > 1 for size in (dims.tp, dims.cp, dims.dp, dims.pp))  # each is in two groups of a rank, or three
    return {
        "imports": _IMPORTS[on_gpu],
        "rendezvous": _MEETING[on_gpu] + _PER_RANK * dims.world,
        "groups": _PER_GROUP[on_gpu] * (1 + 2 * axes),
        "data": _DATA,
        # A tensor is drawn whole by each rank that holds a part of it, so that tensor parallelism saves nothing.
        "model": 0.0 if given else parameters / _DRAWN,
        "weights": _reading(config, dims, hardware, parameters / dims.tp, resumes=resumes) if given else 0.0,
        "outputs": _OUTPUTS,
        "first_batch": _FIRST_BATCH,
        "first_step": _WARM_UP[on_gpu] + step,
    }


def _reading(config: Config, dims: Dims, hardware: Hardware, held: float, *, resumes: bool) -> float:
    """Return the seconds in which ranks of `held` parameters read weights, or a checkpoint's masters and moments.

    Data-parallel ranks read each byte once, and send others what these hold, too.
    """
    size = 12 if resumes else 2  # bytes of a parameter in files; weights follow from masters
    sharded = config.parallel.data_parallel_sharding != "none"
    sent = (2 if sharded else size) * held * (dims.dp_cp > 1)
    return size * held / dims.dp_cp / hardware.own_host.disk + sent / hardware.link(dims.world).bandwidth


def starting_line(config: Config, dims: Dims, hardware: Hardware, step: float, *, name: str, resumes: bool) -> str:
    """Return a line with the predicted seconds until the end of the first step, and the longest parts of them."""
    parts = start_estimate(config, dims, hardware, step, resumes=resumes)
    whole = sum(parts.values())
    long = sorted((part for part in parts if parts[part] > _LEAST * whole), key=lambda part: -parts[part])
    shown = ", ".join(f"{_seconds(parts[part])} {PARTS[part]}" for part in long)
    return f"starts in about {_seconds(whole)} at {several(dims.world, 'rank')}, of which {shown} ({name}; an estimate)"


def _seconds(value: float) -> str:
    return f"{value:.2g} s" if value < 10 else f"{value:,.0f} s"
