"""Measure layers, collectives and the optimizer on this machine, for the profile of `megavlm calibrate`."""

from __future__ import annotations

import contextlib
import io
import math
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

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
from megavlm.planner.fit import TimedLayer
from megavlm.planner.hardware import Link
from megavlm.planner.terms import ATTENTION_BACKWARD
from megavlm.train.build import build
from megavlm.train.loop import close
from megavlm.train.run import Run


def timed_layers(config: Config, backend: Backend, *, repeats: int) -> tuple[list[TimedLayer], list[TimedLayer], float]:
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
