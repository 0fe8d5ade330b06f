"""`--plan auto` and `--dry-run`: the planner's answers for one configuration, without touching a device."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

from megavlm.arch.dims import Dims
from megavlm.arch.plan import make_plan
from megavlm.arch.scenario import Scenario, scenario_of
from megavlm.config.device_defaults import chunk_patches
from megavlm.config.messages import several
from megavlm.config.resolve import resolve
from megavlm.config.schema import Config
from megavlm.errors import UserError
from megavlm.planner.candidates import Space
from megavlm.planner.hardware import HOST_USABLE, Hardware, for_precision, profile
from megavlm.planner.host_memory import line, node_memory_error
from megavlm.planner.layer_profiles import layer_profiles
from megavlm.planner.memory import Memory
from megavlm.planner.search import search
from megavlm.planner.step import EncoderEstimate, StepEstimate, colocated_encoder, encoder_layers, step_of


def planned(config: Config, world: int, *, vocab_size: int | None = None) -> Config:
    """Return the configuration with the layout that a search finds for this many processes, for `--plan auto`.
    It offloads more than the configuration says only where no layout can run otherwise.

    Raises UserError where no layout can run, with the most frequent reason.
    """
    if config.placement.plan != "auto":
        return config
    hardware = profile(config.placement.hardware)
    run = resolve(config, vocab_size=vocab_size)
    outcome = search(run, world, hardware, space=Space(offload=()), top=1)
    if not outcome.best:
        outcome = search(run, world, hardware, top=1)
    if not outcome.best:
        reasons = [each.reason for each in outcome.rejected]
        common = max(set(reasons), key=reasons.count)
        raise UserError(f"--plan auto finds no layout of {world} processes that can run: {common}")
    return _manual(outcome.config(config))


def _manual(config: Config) -> Config:
    """Return the configuration with a fixed layout, as RUN_DIR/config.yaml stores it: restarts do not search."""
    return replace(config, placement=replace(config.placement, plan="manual"))


def predict(config: Config, dims: Dims, hardware: Hardware) -> StepEstimate:
    """Return the estimate of one step of the configured layout, at the cuts that it would run with."""
    hardware = for_precision(hardware, config.precision.dtype)
    plan, scenario = make_plan(config, dims), scenario_of(config, dims, on_gpu=hardware.on_gpu)
    first = encoder_layers(scenario) if plan.placement == "colocated" else 0
    modes = (config.execution.recompute_granularity,) * len(plan.chunks)
    cuts = tuple(accumulate(len(names) for names in plan.chunks))[:-1]
    profiles = layer_profiles(scenario, hardware, modes=modes[:1], first=first)
    return step_of(profiles, hardware, cuts, modes, encoder=_encoder(config, scenario, hardware) if first else None)


def _encoder(config: Config, scenario: Scenario, hardware: Hardware) -> EncoderEstimate:
    counts = config.data.images_per_sample
    return colocated_encoder(
        scenario,
        hardware,
        images=max(1, round(sum(counts) / max(1, len(counts)))) * config.train.micro_batch_size,
        chunk_patches=chunk_patches(config, on_gpu=hardware.on_gpu),
        kept=config.placement.encoder_keep_chunks,
        vision_tp=config.parallel.vision_tensor_model_parallel_size,
    )


def memory_of(config: Config, dims: Dims, *, on_gpu: bool) -> tuple[Memory, ...]:
    """Return the predicted peak memory of each pipeline rank of the configured layout."""
    return predict(config, dims, profile(_profile(on_gpu))).memory


def duration_line(config: Config, dims: Dims, *, on_gpu: bool) -> str:
    """Return a line on how long the run's iterations will take on `--hardware`, as the planner estimates a step."""
    name = device_of(config, on_gpu=on_gpu)
    seconds, iterations = predict(config, dims, profile(name)).seconds, config.train.train_iters
    minutes = round(seconds * iterations / 60)
    return (
        f"about {minutes // 60} h {minutes % 60:02} min: {several(iterations, 'iteration')} of {seconds:.3g} s on "
        f"{name}, as the planner estimates them (--hardware)"
    )


def offload_line(config: Config, dims: Dims, *, on_gpu: bool) -> str | None:
    """Return a line of text on the host memory that the configured layout uses, or None if nothing is offloaded."""
    hardware = profile(_profile(on_gpu))
    step = predict(config, dims, hardware)
    return line(step.host, dims.world, hardware) if step.host else None


def offload_memory_error(config: Config, dims: Dims, *, node_memory: float, devices: int) -> str | None:
    """Return an error message if offloading needs more than the `node_memory` bytes of a node with `devices` GPUs, else
    None.
    """
    hardware = profile("h100")
    spare = replace(hardware.own_host, memory=HOST_USABLE * node_memory)
    hardware = replace(hardware, devices_per_node=devices, host=spare)
    host = predict(config, dims, hardware).host
    return node_memory_error(host, dims.world, hardware) if host else None


def device_of(config: Config, *, on_gpu: bool) -> str:
    """Return the name of the device that a dry run estimates for: --hardware, or h100 where that says nothing."""
    name = config.placement.hardware
    return _profile(on_gpu) if name == "cpu" else name


def _profile(on_gpu: bool) -> str:
    return "h100" if on_gpu else "cpu"
