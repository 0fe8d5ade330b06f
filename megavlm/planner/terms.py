"""Seconds of a layer's passes by term, on one rank without collectives: of the device, and of the host that launches.

The search's cost model (`cost.py`) and the picture of one GPU (`benchmarks/explain.py`) both add up these. On a GPU a
layer's passes over memory come from a table (`passes.py`). On a CPU, where rates are measured, they are twice what the
layer saves for its backward pass, and launches are calls that the device itself takes time for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from megavlm.arch.kind import FP32
from megavlm.arch.kinds import is_transformer, kind_in, layer_cost, layer_kind, layer_sizes
from megavlm.arch.scenario import Scenario
from megavlm.arch.transformer import logits_at_once
from megavlm.planner.experts import product_seconds
from megavlm.planner.hardware import Hardware, fp8_speed
from megavlm.planner.passes import MemoryPasses, Pair, launches, memory_traffic, touched_bytes

# FP8 products reach this share of twice bf16's rate: 1,040 TFLOP/s on an H100. Estimate, from one published run.
FP8_SHARE = 0.8
# Products in fp32 reach this share of bf16's rate: 19.5 of 312 TFLOP/s on an A100, 67 of 989 on an H100 (data sheets).
FP32_SHARE = 1 / 16
_LOGIT_LAUNCHES = 6  # for a block of logits: slice, product, mask, its filling, largest of the block and of all


@dataclass(frozen=True)
class HostTime:
    """The host's seconds, forward and backward: for each operation that it launches, and for a layer's Python."""

    operation: Pair = (10e-6, 8e-6)  # torch's dispatcher, autograd and the driver: estimate
    layer: Pair = (900e-6, 500e-6)  # five modules of Transformer Engine of some 180 µs: estimate, 1.0 to 1.4 ms in all
    attention_call: float = 0.0  # beyond an operation's, where one layer calls attention for each window
    waits: bool = False  # whether vision layers ask the device for a number, so that the host is never ahead


TE_HOST = HostTime()
TORCH_HOST = HostTime(layer=(100e-6, 0.0))  # modules without Transformer Engine's checks: estimate


def layer_terms(name: str, scenario: Scenario, hardware: Hardware, passes: MemoryPasses) -> dict[str, Pair]:
    """Return the device's seconds, forward and backward, by term. `passes` is used for a GPU only."""
    terms = work_terms(name, scenario, hardware)
    rates = hardware.forward.bandwidth, hardware.backward.bandwidth
    if scenario.on_gpu:
        moves = memory_traffic(name, scenario, passes).terms
    else:
        touched = touched_bytes(name, scenario)
        moves = {"other": (2 * touched, 4 * touched)}  # written once, read once; backward the same of two gradients
        calls = kind_in(scenario.model, name).calls(scenario.model)
        terms["calls"] = (calls * hardware.forward.overhead, calls * hardware.backward.overhead)
    terms |= {term: (pair[0] / rates[0], pair[1] / rates[1]) for term, pair in moves.items()}
    return terms if _has_backward(name, scenario) else {term: (pair[0], 0.0) for term, pair in terms.items()}


def work_terms(name: str, scenario: Scenario, hardware: Hardware) -> dict[str, Pair]:
    """Return the seconds of a layer's products and of its attention on one tensor-parallel rank."""
    faster = max(1.0, fp8_speed(hardware) * FP8_SHARE) if name in scenario.fp8 else 1.0
    products, attention = rank_flops(name, scenario)
    products /= faster
    reached = scenario.gradient_reaches[scenario.names.index(name)]
    ahead, back = layer_kind(name).products(scenario, trained=scenario.trains(name), reached=reached)
    terms = {"products": (ahead * products / hardware.forward.matmul, back * products / hardware.backward.matmul)}
    if attention:
        terms["attention"] = (attention / hardware.forward.attention, 2 * attention / hardware.backward.attention)
    if name in scenario.clipped:
        terms["largest logits"] = (0.0, _logit_seconds(name, scenario, hardware))
    if layer_cost(name, scenario.model, scenario.work).expert_flops:
        terms["experts"] = product_seconds(name, scenario, hardware, reached=reached, faster=faster)
    return terms


def rank_flops(name: str, scenario: Scenario) -> tuple[float, float]:
    """Return the forward FLOPs of a layer's products but for routed experts', and of its attention, on one
    tensor-parallel rank.
    """
    cost, tp = layer_cost(name, scenario.model, scenario.work), scenario.dims.tp
    attention = cost.attention_flops / tp
    padding = kind_in(scenario.model, name).padding(scenario.model, tp)
    products = cost.forward_flops / tp - attention - cost.expert_flops / tp
    return products * padding[0], attention * padding[1]


def _logit_seconds(name: str, scenario: Scenario, hardware: Hardware) -> float:
    """Return the seconds of a layer's logits for `--qk-clip`, written in fp32 and read once: one of attention's two
    products. They count with the backward pass, as a recomputed layer looks at them there, and each layer looks once.
    """
    rates, attention = hardware.forward, rank_flops(name, scenario)[1]
    product = attention / 2 / (rates.matmul * (FP32_SHARE if scenario.on_gpu and scenario.bytes_each == FP32 else 1.0))
    return product + 2 * FP32 * attention / (4 * layer_sizes(name, scenario).width) / rates.bandwidth


def launch_seconds(name: str, scenario: Scenario, passes: MemoryPasses, host: HostTime) -> Pair:
    """Return the host's seconds to launch a layer's passes on a GPU; 0 on a CPU, which launches nothing."""
    if not scenario.on_gpu:
        return 0.0, 0.0
    python = host.layer if is_transformer(name) else (0.0, 0.0)
    issued = launches(name, scenario, passes)
    forward, backward = (n * each + more for n, each, more in zip(issued, host.operation, python, strict=True))
    if name in scenario.clipped:
        logits = rank_flops(name, scenario)[1] / (4 * layer_sizes(name, scenario).width)
        backward += math.ceil(logits / logits_at_once(on_gpu=True)) * _LOGIT_LAUNCHES * host.operation[0]
    return forward, backward * _has_backward(name, scenario)


def host_of(scenario: Scenario) -> HostTime:
    """Return the host's costs of launching the layers of a scenario."""
    return TE_HOST if scenario.te else TORCH_HOST


def _has_backward(name: str, scenario: Scenario) -> bool:
    return scenario.trains(name) or scenario.gradient_reaches[scenario.names.index(name)]
