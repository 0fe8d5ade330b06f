"""Predict the seconds of layers, transfers, gradient reduction and updates: FLOPs and bytes over a device's rates.

A pass is matrix products, attention, memory traffic (`terms.py`) and, under tensor parallelism, collectives, one after
the other: megatron-core's linear layers wait for them on the CPU and, but for one overlap in backward, on a GPU too.
Backward runs each product once for the weight's gradient where the weight is trained and once for the input's where
something below is: 2, 4 or 6 FLOPs per parameter and token, forward included; the output layer's logits are computed
twice where it is trained (`LayerKind.products`). The host's launch time of a layer is a separate number: whether it
delays a GPU depends on the layers before (`layer_profiles.relay`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from megavlm.arch.kind import FP32
from megavlm.arch.kinds import (
    communication,
    is_transformer,
    kind_in,
    layer_cost,
    layout_parameters,
    leaves_weight_gradient,
    saved_bytes,
    updated_parameters,
)
from megavlm.arch.layers import OUTPUT
from megavlm.arch.scenario import HOST_PIECE, Code, Recompute, Scenario
from megavlm.planner.collectives import Group, all_reduce, all_to_all, gathers, group_of
from megavlm.planner.hardware import Hardware
from megavlm.planner.memory import is_offloaded, parameters_here, state_numbers
from megavlm.planner.terms import (
    HostTime,
    Pair,
    Update,
    exchange_seconds,
    host_of,
    launch_seconds,
    layer_terms,
    memory_traffic,
    program_of,
    rank_flops,
    touched_bytes,
)

_ATTENTION_LAUNCHES = 3  # cuDNN's kernel and its two helpers
_LINEARS, _WEIGHT_LAUNCHES = 4, 2  # linear layers of a transformer layer; of each a product and its addition to a sum
_CODING = 100  # bytes of memory that coding, decoding and what is lost read and write for a number, counted by hand
_CPU_UPDATE = Update(over_tokens=0, clip=0, rule=32, copy=0)


@dataclass(frozen=True)
class Seconds:
    """Seconds of one micro-batch in one layer on one tensor-parallel rank."""

    forward: float
    backward: float
    launch: Pair = (0.0, 0.0)  # of the host, beside the device's: forward, backward
    weight: Pair = (0.0, 0.0)  # of the backward pass: what may wait, the device's and the host's
    attention: float | None = None  # of the forward pass: what selective recomputation runs again; None: nothing


def layer_seconds(name: str, scenario: Scenario, hardware: Hardware, recompute: Recompute = "none") -> Seconds:
    """Return a layer's forward and backward seconds; the backward pass includes recomputation."""
    return recomputed(name, scenario, hardware, recompute, once=seconds_once(name, scenario, hardware))


def seconds_once(name: str, scenario: Scenario, hardware: Hardware) -> Seconds:
    """Return a layer's seconds without recomputation and without copies of offloaded activations."""
    passes, host = program_of(scenario), host_of(scenario)
    terms = layer_terms(name, scenario, hardware, passes)
    index = scenario.names.index(name)
    reached, trained, tp = scenario.gradient_reaches[index], scenario.trains(name), scenario.dims.tp
    group = group_of(hardware, tp, span=tp)
    sent = communication(name, scenario)
    again = sent.gathers if trained and scenario.sequence_parallel and name != OUTPUT else ()
    exchange = gathers((*sent.gathers, *sent.reductions, *sent.exchanges), group)
    across = context_seconds(name, scenario, hardware)
    exchanges = kind_in(scenario.model, name).expert_exchange(scenario)
    exchange += across + sum(exchange_seconds(each, hardware) for each in exchanges)
    issue, issue_back = launch_seconds(name, scenario, passes, host)
    calls = len(sent.gathers) + len(sent.reductions) + len(sent.exchanges) + 2 * (across > 0) + len(exchanges)
    issue += calls * host.operation[0] * scenario.on_gpu
    forward = sum(pair[0] for pair in terms.values()) + exchange
    if exchanges:  # the host asks the device how many rows each rank gets, and so is never ahead of it
        forward = max(forward, issue)
    if not (trained or reached):
        return Seconds(forward, 0.0, (issue, 0.0))
    # The input's gradient goes the opposite ways, and sequence-sharded inputs are gathered once more for the weight's;
    # the output layer keeps its whole input.
    backward = sum(pair[1] for pair in terms.values()) + exchange + gathers(again, group)
    issue_back += (calls + len(again)) * host.operation[1] * scenario.on_gpu
    weight = _weight_seconds(name, scenario, terms, host) if leaves_weight_gradient(name, scenario) else (0.0, 0.0)
    weight = (weight[0] + gathers(again, group), weight[1]) if weight[0] else weight
    attention = terms["attention"][0] + across if "attention" in terms else None
    return Seconds(forward, backward, (issue, issue_back), weight, attention)


def recomputed(name: str, scenario: Scenario, hardware: Hardware, recompute: Recompute, *, once: Seconds) -> Seconds:
    """Add recomputation and copies of offloaded activations to `once`, the result of `seconds_once`."""
    reached = scenario.gradient_reaches[scenario.names.index(name)]
    if not (scenario.trains(name) or reached):
        return once
    backward, (issue, issue_back) = once.backward, once.launch
    if recompute == "full" and kind_in(scenario.model, name).is_recomputed(scenario.model):
        if reached or not is_transformer(name):
            backward, issue_back = backward + once.forward, issue_back + issue
    elif recompute == "selective" and once.attention is not None:
        backward += once.attention
        issue_back += _ATTENTION_LAUNCHES * host_of(scenario).operation[0] * scenario.on_gpu
    again = replace(once, backward=backward, launch=(issue, issue_back))
    return _with_copies(name, scenario, hardware, recompute, again)


def _with_copies(name: str, scenario: Scenario, hardware: Hardware, recompute: Recompute, seconds: Seconds) -> Seconds:
    """Return a layer's seconds with the copies of its offloaded activations to the host and back."""
    if not is_offloaded(name, scenario):
        return seconds
    copy = hardware.own_host.link.seconds(saved_bytes(name, scenario, recompute))
    if not scenario.on_gpu:  # one processor copies and computes
        return replace(seconds, backward=seconds.backward + 2 * copy)
    # Copies overlap with the next layer's forward pass, and with the backward pass of the layer after. Only backward
    # passes depend on recomputation, so the rest of a copy out beyond a forward pass is counted there as well.
    return replace(seconds, backward=max(seconds.backward, copy) + max(0.0, copy - seconds.forward))


def _weight_seconds(name: str, scenario: Scenario, terms: dict[str, Pair], host: HostTime) -> Pair:
    """Return the device's and the host's seconds of a layer's weight gradients without collectives: half of the
    backward products (input gradients take the other half) and the sums. The output layer's input has its gradient
    already.
    """
    products = sum(terms[term][1] for term in ("products", "experts") if term in terms)
    device = products * (1.0 if name == OUTPUT else 0.5) + terms.get("weight gradients", (0.0, 0.0))[1]
    return device, _WEIGHT_LAUNCHES * (1 if name == OUTPUT else _LINEARS) * host.operation[1] * scenario.on_gpu


def context_seconds(name: str, scenario: Scenario, hardware: Hardware) -> float:
    """Return the seconds of a layer's all-to-alls among context-parallel ranks in a forward pass.

    Ranks that exchange heads are assumed to be spread over the whole TP × CP group.
    """
    dims = scenario.dims
    if dims.cp == 1:
        return 0.0
    exchanges = kind_in(scenario.model, name).context_exchange(scenario)
    return sum(all_to_all(size, group_of(hardware, ranks, span=dims.tp * dims.cp)) for ranks, size in exchanges)


def features_of(name: str, scenario: Scenario) -> tuple[float, float, float, float]:
    """Return (FLOPs of products, FLOPs of attention, bytes, calls) of a forward pass, for `megavlm calibrate`."""
    products, attention = rank_flops(name, scenario)
    traffic = 2 * touched_bytes(name, scenario)
    if scenario.on_gpu:
        traffic = sum(pair[0] for pair in memory_traffic(name, scenario, program_of(scenario)).values())
    experts = layer_cost(name, scenario.model, scenario.work).expert_flops / scenario.dims.tp
    return products + experts, attention, traffic, kind_in(scenario.model, name).calls(scenario.model)


def transfer_seconds(size: float, scenario: Scenario, hardware: Hardware) -> float:
    """Return the seconds to send `size` bytes to the next pipeline rank."""
    dims = scenario.dims
    if dims.pp == 1:
        return 0.0
    link = hardware.link(2 * dims.tp * dims.dp_cp)
    return 2 * link.latency + link.seconds(size)


def gradient_seconds(trained: float, scenario: Scenario, hardware: Hardware, *, held: float = 0.0) -> float:
    """Return the seconds to reduce a rank's gradients over DP × CP ranks and to gather updated weights.

    ZeRO-2 and 3 reduce after each micro-batch and gather all weights that a rank holds, frozen ones too: ZeRO-2 once a
    step, ZeRO-3 for each pass.
    """
    ranks = scenario.dims.dp_cp
    if ranks == 1:
        return row_seconds(trained, held, scenario, hardware)
    shards, tp = scenario.shards, scenario.dims.tp
    if scenario.sharding == "none":
        return _sum_between(trained, group_of(hardware, ranks, span=ranks * tp), scenario, hardware)
    group, seconds = group_of(hardware, shards, span=shards * tp), 0.0
    if shards < ranks:
        seconds = _sum_between(
            trained / shards, group_of(hardware, ranks // shards, span=ranks * tp), scenario, hardware
        )
    if not scenario.shards_gradients:
        return (
            seconds
            + _scatter_seconds(trained, scenario, hardware)
            + _gather_seconds(trained, group, scenario, hardware)
        )
    passes, again = scenario.micro_batches if scenario.sharding == "full" else 1, scenario.regathering_ranks
    whole = _gather_seconds(held, group, scenario, hardware)
    seconds += passes * whole
    if scenario.sharding == "full":  # for backward passes
        inside = gathers((held * scenario.bytes_each,), group_of(hardware, again, span=again * tp))
        seconds += passes * (inside if again < shards else whole)
    seconds += scenario.micro_batches * _scatter_seconds(trained, scenario, hardware)
    return max(seconds, row_seconds(trained / shards, held / shards, scenario, hardware))


def _scatter_seconds(trained: float, scenario: Scenario, hardware: Hardware) -> float:
    """Return the seconds of a reduce-scatter of gradients in a shard group; coded if configured, but not under HSDP."""
    shards, tp = scenario.shards, scenario.dims.tp
    if scenario.gradient_code == "none" or shards < scenario.dims.dp_cp:
        return gathers((trained * scenario.gradient_bytes,), group_of(hardware, shards, span=shards * tp))
    inside = min(shards, scenario.code_group)
    seconds = gathers((trained * FP32,), group_of(hardware, inside, span=inside * tp))
    across = group_of(hardware, shards // inside, span=shards * tp)
    seconds += all_to_all(trained / inside * coded_bytes(scenario.gradient_code), across)
    return seconds + trained * _CODING / hardware.memory_bandwidth


def _gather_seconds(numbers: float, group: Group, scenario: Scenario, hardware: Hardware) -> float:
    """Return the seconds of an all-gather of `numbers` weights, coded if configured."""
    if scenario.weight_code == "none":
        return gathers((numbers * scenario.bytes_each,), group)
    seconds = gathers((numbers * coded_bytes(scenario.weight_code),), group)
    return seconds + numbers * _CODING / 2 / hardware.memory_bandwidth


def row_seconds(own: float, held: float, scenario: Scenario, hardware: Hardware) -> float:
    """Return the seconds of the bus transfers of offloaded ZeRO-3 parameters in a step, which overlap the collectives:
    a rank's shards go to the device for each all-gather, gradients of its `own` parameters go back. Both directions
    run at once.
    """
    if parameters_here(scenario) or not scenario.on_gpu:
        return 0.0
    link, count = hardware.own_host.link, scenario.micro_batches
    rows = FP32 * own + scenario.bytes_each * (held - own)
    passes = 2 if scenario.regathering_ranks == scenario.shards else 1
    return max(passes * count * link.seconds(rows), count * link.seconds(FP32 * own))


def _sum_between(numbers: float, group: Group, scenario: Scenario, hardware: Hardware) -> float:
    """Return the seconds of an all-reduce of `numbers` gradients, exact or coded (both directions)."""
    if scenario.gradient_code == "none":
        # Rows of micro-batches are summed in fp32.
        size = FP32 if scenario.shards_gradients else scenario.gradient_bytes
        return all_reduce(numbers * size, group)
    coded = numbers * coded_bytes(scenario.gradient_code)
    return all_to_all(coded, group) + gathers((coded,), group) + numbers * _CODING / hardware.memory_bandwidth


def coded_bytes(code: Code) -> float:
    """Return the bytes of a coded number on a link (`optim/codes.py`); one-byte codes add a byte per 128 numbers."""
    return {"none": FP32, "bf16": 2.0, "int8": 129 / 128, "fp8": 129 / 128}[code]


def optimizer_seconds(trained: float, scenario: Scenario, hardware: Hardware) -> float:
    """Return the seconds of an optimizer update, from its memory traffic. With `--offload optimizer` the host updates:
    12 bytes per parameter cross the bus; state on a disk is read and written.
    """
    own = trained / scenario.shards
    rest, update = update_bytes(trained, scenario)
    if "optimizer" in scenario.offload:
        beside = scenario.shards_gradients and not parameters_here(scenario)
        state = state_numbers(scenario)
        seconds = host_update_seconds(own, hardware, state=state, on_disk=scenario.moments_on_disk, beside=beside)
        if not beside:
            return seconds + rest / hardware.memory_bandwidth
        added = 3 * FP32 * own * (scenario.micro_batches - 1)  # gradients to those before, while the device waits
        return seconds + (rest + added) / hardware.own_host.bandwidth
    return (rest + update) / hardware.memory_bandwidth


def update_bytes(trained: float, scenario: Scenario) -> tuple[float, float]:
    """Return the bytes read and written for the gradients and by the optimizer, on a rank with `trained` parameters.

    Clearing touches all fp32 gradients of a rank, all else only the gradients of its own shard. On a CPU, whose rate
    is measured by this count, an update reads and writes gradient, weight and two moments.
    """
    own = trained / scenario.shards
    gradients = own if scenario.shards_gradients else trained
    each = program_of(scenario).update if scenario.on_gpu else _CPU_UPDATE
    copied = each.copy * (scenario.bytes_each != FP32)
    return gradients * each.zero + own * (each.over_tokens + each.norm + each.clip), own * (each.rule + copied)


def host_update_seconds(
    own: float, hardware: Hardware, *, state: int = 2, on_disk: bool = False, beside: bool = False
) -> float:
    """Return the seconds to update `own` parameters on the host in pieces: transfers overlap with updates.

    `state`: numbers that the optimizer keeps per parameter; `on_disk`: they are read from a disk and written back in
    pieces at the same time; `beside`: parameters and gradients are on the host already.
    """
    host = hardware.own_host
    parts = [(3 + 2 * state) * FP32 / host.bandwidth, *[state * FP32 / host.disk] * (2 * on_disk)]
    parts += [] if beside else [3 * FP32 / host.link.bandwidth]
    piece = min(own, HOST_PIECE)
    return piece * sum(parts) + (own - piece) * max(parts)


def held_parameters(scenario: Scenario, start: int, end: int) -> float:
    """Return the number of parameters of layers start … end−1 on a rank under one of `Scenario.layouts`, before ZeRO-3
    shards them.
    """
    return sum(layout_parameters(name, scenario) for name in scenario.names[start:end])


def trained_parameters(scenario: Scenario, start: int, end: int) -> float:
    """Return the number of trained parameters of layers start … end−1 on a rank under one of `Scenario.layouts`."""
    return sum(updated_parameters(name, scenario) for name in scenario.names[start:end])
