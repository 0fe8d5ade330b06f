"""Measure layers, collectives and the optimizer on this machine, for the profile of `megavlm calibrate`."""

from __future__ import annotations

import contextlib
import io
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist

from megavlm.arch.kinds import layer_kind
from megavlm.arch.layers import EMBEDDING
from megavlm.arch.scenario import Scenario, scenario_of
from megavlm.backend import Backend
from megavlm.config.schema import Config
from megavlm.model.context import MicroBatchContext
from megavlm.parallel.groups import destroy_groups
from megavlm.planner.cost import features_of, update_bytes
from megavlm.planner.hardware import PROFILES, Hardware, Link, Rates, profile_of_device
from megavlm.planner.terms import ATTENTION_BACKWARD
from megavlm.train.build import build
from megavlm.train.loop import close
from megavlm.train.run import Run


@dataclass(frozen=True)
class TimedLayer:
    """One measured pass of a layer: FLOPs of matrix products and of attention, bytes touched, calls, and seconds."""

    products: float
    attention: float
    traffic: float
    calls: float
    seconds: float


Timed = tuple[list[TimedLayer], list[TimedLayer], float]  # of a model: forward, backward, bytes/s of the optimizer


def measured_hardware(
    configs: Sequence[Config], backend: Backend, *, repeats: int, rounds: int, processes_per_node: int
) -> tuple[Hardware, str]:
    """Return the profile of this machine, measured on layers of small models, and a summary; all ranks call it.

    Medians over rounds cancel slow drifts of speed.
    """
    timed = [[timed_layers(config, backend, repeats=repeats) for config in configs] for _ in range(rounds)]
    forward, backward = ([_median(same) for same in zip(*_layers(timed, side), strict=True)] for side in (0, 1))
    between, world = measure_link(backend), dist.get_world_size()
    base = PROFILES["cpu"] if backend.is_cpu else profile_of_device(backend.name) or PROFILES["h100"]
    hardware = replace(
        base,
        name=backend.name,
        source=f"measured with {world} processes, {configs[0].precision.dtype}",
        memory=_memory(on_cpu=backend.is_cpu, processes=processes_per_node),
        forward=fit(forward, base.peak),
        backward=fit(backward, base.peak),
        memory_bandwidth=statistics.median(rate for models in timed for _, _, rate in models),
        near=between or base.near,
        devices_per_node=max(base.devices_per_node, world),
    )
    return hardware, _summary(hardware, forward, backward)


def _layers(timed: Sequence[Sequence[Timed]], side: Literal[0, 1]) -> list[list[TimedLayer]]:
    """Return the layers of all models in each round, of the forward or the backward pass."""
    return [[layer for model in models for layer in model[side]] for models in timed]


def _median(same: Sequence[TimedLayer]) -> TimedLayer:
    return replace(same[0], seconds=statistics.median(each.seconds for each in same))


def _memory(*, on_cpu: bool, processes: int) -> float:
    """Return the bytes available to one process's tensors: 90 % of a GPU, or an equal share of 80 % of host memory."""
    if on_cpu:
        import psutil

        return float(psutil.virtual_memory().total) * 0.8 / processes
    return float(torch.cuda.mem_get_info()[1]) * 0.9


def _summary(hardware: Hardware, forward: Sequence[TimedLayer], backward: Sequence[TimedLayer]) -> str:
    lines = [f"{hardware.name}: {hardware.source}"]
    for side, rates, samples in (("forward", hardware.forward, forward), ("backward", hardware.backward, backward)):
        errors = [abs(predicted(sample, rates) / sample.seconds - 1) for sample in samples]
        lines.append(
            f"{side:9} matmul {rates.matmul / 1e9:8.1f} GFLOP/s, attention {rates.attention / 1e9:8.1f} GFLOP/s, "
            f"memory {rates.bandwidth / 1e9:6.2f} GB/s, {rates.overhead * 1e6:4.0f} µs per call; "
            f"median error {statistics.median(errors):.0%} over {len(errors)} layers"
        )
    lines.append(
        f"optimizer {hardware.memory_bandwidth / 1e9:.2f} GB/s; between processes {hardware.near.bandwidth / 1e9:.2f} "
        f"GB/s, {hardware.near.latency * 1e6:.0f} µs; {hardware.memory / 2**30:.1f} GiB for tensors"
    )
    return "\n".join(lines)


def timed_layers(config: Config, backend: Backend, *, repeats: int) -> Timed:
    """Return (forward samples, backward samples, bytes/s of an optimizer step) of a configuration at TP 1, PP 1."""
    destroy_groups()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        run = build(config, backend)
    try:
        case = scenario_of(run.config, run.plan.dims, on_gpu=not backend.is_cpu)
        batches = run.data_loader.next_step().batches
        run.engine.train_step(batches)
        times = [_layer_times(run, batches[0], backend) for _ in range(repeats + 1)][1:]
        forward, backward = [], []
        for name in times[0]:
            took = [statistics.median(each[name][side] for each in times) for side in (0, 1)]
            trained, reached = case.trains(name), case.gradient_reaches[case.names.index(name)]
            ahead, back = layer_kind(name).products(case, trained=trained, reached=reached)
            forward.append(_timed_layer(name, case, took[0], products=ahead, attention=1, passes=1))
            if trained and name != EMBEDDING:
                passes = 1 + reached
                backward.append(
                    _timed_layer(name, case, took[1], products=back, attention=ATTENTION_BACKWARD, passes=passes)
                )
        return forward, backward, _optimizer_rate(run, case, repeats)
    finally:
        close(run)


def _timed_layer(
    name: str, case: Scenario, seconds: float, *, products: int, attention: float, passes: int
) -> TimedLayer:
    """Return a layer's work and time as a sample for the fit.

    The pass has a forward pass's products `products` times, its attention `attention` times, and its memory traffic
    `passes` times: one for each gradient in a backward pass (`cost.layer_seconds`).
    """
    flops, attended, traffic, calls = features_of(name, case)
    return TimedLayer(flops * products, attended * attention, traffic * passes, calls, max(seconds, 1e-7))


def _layer_times(run: Run, batch: Any, backend: Backend) -> dict[str, tuple[float, float]]:
    """Return the seconds of each layer's forward and backward pass, measured layer by layer."""
    chunk = run.engine.chunks[0].module
    view = MicroBatchContext(batch.to(backend.device), run.config, run.engine.groups, device=backend.device)
    hidden: torch.Tensor | None = None
    times: dict[str, tuple[float, float]] = {}
    for name in chunk.names:
        given = None if hidden is None else hidden.detach().requires_grad_()
        output, forward = _timed(partial(chunk.run_layer, name, given, view), backend)
        gradient = torch.ones_like(output)
        _, backward = _timed(partial(torch.autograd.backward, output, gradient), backend)
        times[name] = (forward, backward)
        hidden = output
    return times


def _timed(call: Callable[[], Any], backend: Backend) -> tuple[Any, float]:
    if not backend.is_cpu:
        torch.cuda.synchronize()
    start = time.perf_counter()
    result = call()
    if not backend.is_cpu:
        torch.cuda.synchronize()
    return result, time.perf_counter() - start


def _optimizer_rate(run: Run, case: Scenario, repeats: int) -> float:
    """Return the bytes/s of clearing gradients, computing their norm and updating weights (`cost.update_bytes`)."""
    engine = run.engine

    def step() -> None:
        engine.optimizer.zero_grad()
        for chunk in engine.chunks:
            chunk.zero_grad_buffer()
        squared = engine.optimizer.squared_norm()
        engine.optimizer.update(norm=math.sqrt(squared.item()), tokens=1)

    times = [_timed(step, run.backend)[1] for _ in range(repeats + 1)]
    trained = sum(p.numel() for chunk in engine.chunks for p in chunk.parameters() if p.requires_grad)
    return sum(update_bytes(trained, case)) / statistics.median(times[1:])


def measure_link(backend: Backend, *, sizes: Sequence[int] = (1 << 12, 1 << 22), repeats: int = 20) -> Link | None:
    """Return latency and bandwidth between this run's processes, from ring all-gathers; None for a single process."""
    world = dist.get_world_size()
    if world == 1:
        return None
    seconds = [_gather_seconds(size, backend, repeats=repeats) for size in sizes]
    moved = [size * (world - 1) / world for size in sizes]
    bandwidth = (moved[1] - moved[0]) / max(seconds[1] - seconds[0], 1e-9)
    return Link(bandwidth, max(0.0, seconds[0] - moved[0] / bandwidth) / (world - 1))


def _gather_seconds(size: int, backend: Backend, *, repeats: int) -> float:
    """Return the median seconds of an all-gather whose result has `size` bytes."""
    part = torch.zeros(size // dist.get_world_size(), dtype=torch.uint8, device=backend.device)
    whole = torch.empty(size, dtype=torch.uint8, device=backend.device)
    dist.barrier()
    times = [_timed(lambda: dist.all_gather_into_tensor(whole, part), backend)[1] for _ in range(repeats)]
    return statistics.median(times[1:])


def fit(samples: Sequence[TimedLayer], peak: float | None = None) -> Rates:
    """Return the rates, none negative, with the least squared error over the samples, each error² divided by the time.

    With relative errors, a norm would count as much as the layers that dominate a step; with absolute errors, only the
    largest layer would count.

    Attention consists of two matrix products and operations between them that take extra time, so a FLOP of attention
    costs at least as much as a FLOP of products. Without this constraint, noise in small layers makes attention free.

    A FLOP costs at least its time at the device's `peak` (FLOP/s), if known. A GPU's layers touch memory in proportion
    to their products, so that without this bound memory traffic could explain all of the time.

    The four unknowns are seconds per FLOP of either kind, extra seconds per FLOP of attention, per byte, and per call.
    Every subset is solved; the best solution without negative numbers is the non-negative least-squares solution.
    """
    weights = np.array([s.seconds for s in samples]) ** -0.5
    least_flop = 0.0 if peak is None else 1 / peak
    spent = np.array([least_flop * (s.products + s.attention) for s in samples])
    target = (np.array([s.seconds for s in samples]) - spent) * weights
    columns = [[s.products + s.attention, s.attention, s.traffic, s.calls] for s in samples]
    rows = np.array(columns, dtype=float) * weights[:, None]
    scale = np.where(rows.max(axis=0) > 0, rows.max(axis=0), 1.0)
    best, least = np.zeros(4), float(np.square(target).sum())
    for size in range(1, 5):
        for chosen in combinations(range(4), size):
            part = (rows / scale)[:, chosen]
            solution = np.linalg.lstsq(part, target, rcond=None)[0]
            error = float(np.square(part @ solution - target).sum())
            if (solution >= 0).all() and error < least * (1 - 1e-12):
                best, least = np.zeros(4), error
                best[list(chosen)] = solution
    flop, more, byte, call = (float(cost) for cost in best / scale)
    flop += least_flop
    products, attention, traffic = (1 / max(cost, 1e-18) for cost in (flop, flop + more, byte))
    return Rates(products, attention, traffic, call)


def predicted(sample: TimedLayer, rates: Rates) -> float:
    """Return the predicted seconds of a pass at these rates."""
    memory_traffic = sample.traffic / rates.bandwidth + sample.calls * rates.overhead
    return sample.products / rates.matmul + sample.attention / rates.attention + memory_traffic
