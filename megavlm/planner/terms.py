"""Predict the seconds of a layer's passes by term, without collectives: on the device, and on the launching host.

The search's cost model (`cost.py`) and the profile of one GPU (`benchmarks/explain.py`) both add up these terms. On a
GPU a layer's memory traffic comes from a table. On a CPU, where rates are measured, the traffic is twice the bytes that
the layer saves for its backward pass, and each call takes a time of its own.

A pass reads or writes a tensor once. `MemoryPasses` counts the passes of each operation between two matrix products,
forward and backward, for one implementation of the layers; fusing an operation changes one number. A test compares
`TORCH` with the bytes that a step on torch's layers moves on the fake device. The counts of Transformer Engine and of
fused kernels come from the arguments of their kernels; launches and host seconds are estimates.

A grouped product of routed experts multiplies the rows of each expert by that expert's weights. It takes the longer of
computing and of moving its bytes (the roofline model; Williams et al. 2009). With few rows it is bound by reading
weights: on an H100 below some 230 rows of an expert. It computes whole tiles of rows, of which the last of each expert
is half empty in the mean: r rows cost what r + tile / 2 do (`Hardware.rows_together`, which a profile may set).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from megavlm.arch.ends import LOSS_WORK, computes_logits_again, logit_columns, predictions
from megavlm.arch.kind import FP32, Exchange
from megavlm.arch.kinds import (
    KINDS,
    hidden_bytes,
    is_transformer,
    kind_in,
    layer_cost,
    layer_kind,
    layer_sizes,
    layout_parameters,
    rank_parameters,
    saved_bytes,
)
from megavlm.arch.layer_sizes import LayerSizes, RoutedRows
from megavlm.arch.layers import EMBEDDING, LANGUAGE_LAYER, LANGUAGE_NORM, MTP_NORM, OUTPUT, kind_of
from megavlm.arch.scenario import Scenario
from megavlm.planner.collectives import all_to_all, group_of, ring_gather
from megavlm.planner.hardware import Hardware, Rates, fp8_speed

Pair = tuple[float, float]  # forward, backward


@dataclass(frozen=True)
class Update:
    """Bytes that a weight update moves per trained parameter of a rank, with fp32 gradients and bf16 weights."""

    zero: float = 4  # written
    over_tokens: float = 8  # ÷ trained tokens: read, written
    norm: float = 4  # read
    clip: float = 8  # read, written
    rule: float = 28  # AdamW's: gradient, master and two moments read, all but the gradient written
    copy: float = 6  # master read, weight written

    @property
    def total(self) -> float:
        return float(sum(vars(self).values()))


@dataclass(frozen=True)
class MemoryPasses:
    """How often a layer's operations read or write tensors, as numbers of passes (comments name the tensor's width) or
    bytes, and how many kernels they launch.
    """

    norm: Pair = (2, 3)  # hidden, two a layer: forward read, written; backward gradient and input read, one written
    residual: Pair = (3, 3)  # hidden, two a layer: two read and one written, each way
    rotation: Pair = (5, 5)  # queries and keys: x·cos, then a multiply-add on each half. Fused: 2
    qkv_split: Pair = (0, 2)  # queries, keys, values: their gradients are written into one tensor. Fused: 0
    rotation_splits: bool = False  # one function splits QKV and rotates: no joined gradient; copies values, not queries
    query_copy: Pair = (2, 0)  # queries, where several share a key: megatron-core makes them contiguous
    value_copy: Pair = (0, 0)  # values: a contiguous copy for the attention kernel, and its gradient
    swiglu: Pair = (5, 13)  # width of the MLP: silu, product; two products, silu's gradient, both halves joined
    quick_gelu: Pair = (7, 14)  # the same: 1.702x, σ, product; and their gradients, added up
    gelu: Pair = (2, 3)  # the same
    permutation: Pair = (9, 9)  # routed rows: sorted by expert, by rank, both again, and added up
    weighing: Pair = (6, 12)  # width of routed rows: times the router's weight in fp32; the gradients of both
    layer_scale: Pair = (2, 6)  # hidden, two a layer: one product; the input's gradient, and the scale's before its sum
    bias: Pair = (2, 1)  # each output with a bias: added; its gradient summed. Inside the product: 0
    qkv_bias_inside: bool = False  # the bias of queries, keys and values is added by their product
    weight_gradient: float = 10  # bytes a trained number: fp32 sum read and written, bf16 gradient read. Fused: 0
    output_weight_gradient: float = 10  # the same of all but transformer layers, whose products are megatron-core's
    expert_weight_gradient: float = (
        10  # the same of routed experts, whose grouped products write gradients of their own
    )
    cross_entropy: Pair = (42, 26)  # bytes a logit, forward and backward
    cross_entropy_again: float = 32  # the same backward, where logits are computed again
    update: Update = Update()
    launches_language: Pair = (21, 39)
    launches_vision: Pair = (16, 38)
    launches_experts: Pair = (40, 50)  # beyond a language layer's: router, sorting, grouped products: estimate
    launches_output: Pair = (36, 11)
    launches_loss_piece: Pair = (0, 0)  # beyond those, for each piece of the logits that the loss is computed in
    launches_again_piece: int = 10  # the same backward, where logits are computed again


# torch's layers, as `benchmarks/host_time.py` counts them. Activations save their input and recompute the rest.
TORCH = MemoryPasses(
    swiglu=(5, 11),
    quick_gelu=(7, 5),
    rotation_splits=True,
    cross_entropy=(54, 4),
    update=Update(over_tokens=0, clip=0, rule=32),  # divided gradients are written back
    launches_language=(18, 30),
    launches_vision=(16, 32),
    launches_output=(30, 5),
    launches_loss_piece=(15, 0),
)
# torch's layers with `--compile-small-ops`: an activation is one kernel each way, and so is rotation with QKV split.
_TORCH_COMPILED = replace(
    TORCH, swiglu=(3, 5), quick_gelu=(2, 3), rotation=(2, 2), launches_language=(11, 21), launches_vision=(14, 31)
)
# Transformer Engine's layers: norms are inside linear layers. Its loss kernel reads logits twice, writes their gradient
# once and multiplies it by the incoming gradient. Activations, and rotation with QKV split, are one kernel each way.
# Biases and sums of weight gradients are inside products, dividing and clipping inside the update. Launches: products,
# norms, cuDNN's attention with its two helpers, and operations that are not fused.
NOW = MemoryPasses(
    rotation=(2, 2),
    rotation_splits=True,
    qkv_split=(0, 0),
    value_copy=(2, 2),
    cross_entropy=(6, 4),
    swiglu=(3, 5),
    quick_gelu=(2, 3),
    bias=(0, 0),
    qkv_bias_inside=True,
    weight_gradient=0,
    update=TORCH.update,
    launches_language=(13, 21),
    launches_vision=(13, 26),
    launches_output=(16, 8),
)
# Transformer Engine's layers where products do not accumulate weight gradients.
_NOW_ADDING = replace(NOW, weight_gradient=10)


def program_of(scenario: Scenario) -> MemoryPasses:
    """Return the memory passes of the layers that a scenario runs on a GPU: Transformer Engine's or torch's."""
    if not scenario.te:
        return _TORCH_COMPILED if scenario.compiled_small_ops else TORCH
    fused = scenario.fused_gradients and not scenario.shards_gradients and "activations" not in scenario.offload
    return NOW if fused and scenario.dims.order != "zb-h1" else _NOW_ADDING


def memory_traffic(name: str, scenario: Scenario, passes: MemoryPasses) -> dict[str, Pair]:
    """Return the bytes that a layer moves outside its products on one rank, forward and backward, by term.

    Under tensor parallelism a rank holds its share of the tensors inside attention and MLP, for all tokens. It holds
    whole hidden states between the two blocks: of its share of the tokens with sequence parallelism, else of all.
    """
    e, trained = scenario.bytes_each, scenario.trains(name)
    transformer, is_norm = is_transformer(name), kind_of(name) in (LANGUAGE_NORM, MTP_NORM)
    if transformer or is_norm:
        each = passes.weight_gradient
    else:
        each = passes.output_weight_gradient + 2 * (name == EMBEDDING)  # whose gradient is zeroed before rows are added
    own = layout_parameters(name, scenario) * trained
    experts = rank_parameters(name, scenario) * trained - own
    summed = each * own + passes.expert_weight_gradient * experts
    added: dict[str, Pair] = {"weight gradients": (0.0, summed)} if summed else {}
    if transformer:
        terms = _of_layer(layer_sizes(name, scenario), scenario, passes, trained=trained, fp8=name in scenario.fp8)
        return {term: _times(pair, e) for term, pair in terms.items() if any(pair)} | added
    if name == OUTPUT:
        ahead, back = passes.cross_entropy
        if computes_logits_again(scenario):
            back = passes.cross_entropy_again * trained
        loss = _times((ahead, back), predictions(scenario) * logit_columns(scenario))
        return {"cross entropy": loss, **added}
    if is_norm:
        return {"norms": _times(passes.norm, hidden_bytes(name, scenario)), **added}
    touched = touched_bytes(name, scenario) if layer_kind(name).is_present(scenario.model) else 0.0
    return {"other": (2 * touched, 4 * touched), **added}


def _of_layer(
    sizes: LayerSizes, scenario: Scenario, passes: MemoryPasses, *, trained: bool, fp8: bool
) -> dict[str, Pair]:
    """Return the elements that a transformer layer reads and writes outside its products, by term."""
    inside, between = sizes.tokens, sizes.tokens / scenario.sequence_shards
    hidden, ffn, gates = sizes.hidden * between, sizes.ffn * inside, sizes.inner
    queries, keys = sizes.heads * sizes.width * inside, sizes.groups * sizes.width * inside
    together = sizes.rotated and passes.rotation_splits
    biased = (gates * ffn + 2 * hidden) * sizes.linear_bias
    biased += (queries + 2 * keys) * sizes.qkv_bias * (not passes.qkv_bias_inside)
    terms = {
        "norms": _times(passes.norm, sizes.norms * hidden),
        "norms of queries and keys": _times(passes.norm, (queries + keys) * sizes.qk_norm),
        "residuals": _times(passes.residual, 2 * hidden),
        "layer scale": _times(passes.layer_scale, 2 * hidden * sizes.scaled),
        "rotation": _times(passes.rotation, (queries + keys) * sizes.rotated),
        "QKV split": _times(passes.qkv_split, (queries + 2 * keys) * (not together)),
        "copies of queries": _times(passes.query_copy, queries * (keys < queries) * (not together)),
        "copies of values": _times((2, 2) if together else passes.value_copy, keys),
        "activation": _times(_activation(passes, sizes.activation), ffn),
        "biases": (passes.bias[0] * biased, passes.bias[1] * biased * trained),
    }
    if sizes.routed is not None:
        routed = sizes.routed.rows * sizes.routed.ffn
        terms["activation of experts"] = _times(_activation(passes, sizes.activation), routed)
        terms["weights of experts"] = _times(passes.weighing, routed)
        terms["permutation of tokens"] = _times(passes.permutation, sizes.routed.rows * sizes.routed.hidden)
    if fp8:
        inputs = 2 * hidden + queries + ffn
        outputs = queries + 2 * keys + 2 * hidden + gates * ffn
        terms["casts to FP8"] = _times((inputs, outputs), FP8[scenario.fp8_recipe].cast / scenario.bytes_each)
    return terms


def touched_bytes(name: str, scenario: Scenario) -> float:
    """Return the bytes that a layer's forward pass writes: its output, and all it would save if it were trained."""
    everything = frozenset(scenario.names)
    kept = replace(scenario, own=everything, trained=everything, loss_chunk=scenario.work.tokens)
    return saved_bytes(name, kept) + hidden_bytes(name, scenario)


def launches(name: str, scenario: Scenario, passes: MemoryPasses) -> Pair:
    """Return the number of operations that the host launches for a layer, forward and backward."""
    kind = kind_of(name)
    if is_transformer(name):
        each = passes.launches_language if kind == LANGUAGE_LAYER else passes.launches_vision
        more = passes.launches_experts if layer_sizes(name, scenario).routed is not None else (0, 0)
        return each[0] + more[0], each[1] + more[1]
    if kind == OUTPUT:
        pieces = predictions(scenario) * logit_columns(scenario) * FP32 / LOSS_WORK
        again = passes.launches_again_piece * (computes_logits_again(scenario) and scenario.trains(name))
        ahead, back = passes.launches_output
        return ahead + passes.launches_loss_piece[0] * pieces, back + (passes.launches_loss_piece[1] + again) * pieces
    return KINDS[kind].kernels(scenario.model) if KINDS[kind].is_present(scenario.model) else (0.0, 0.0)


def _activation(passes: MemoryPasses, kind: str) -> Pair:
    return {"swiglu": passes.swiglu, "geglu": passes.swiglu, "quick_gelu": passes.quick_gelu}.get(kind, passes.gelu)


def _times(pair: Pair, factor: float) -> Pair:
    return pair[0] * factor, pair[1] * factor


@dataclass(frozen=True)
class FP8Terms:
    """Relative rate of FP8 products, and bytes of casting each number of a product's input or output gradient."""

    share: float  # of bf16's rate times the ratio of the peaks
    cast: float


# By `--fp8-recipe`. A cast reads bf16 and writes two copies, one of them transposed; where the scale follows from the
# tensor itself, it reads twice. Shares: from the language part of LLaVA-1.5-7B on an H100 (816 TFLOP/s) and an H200
# (878 to 921), `blockwise` from a step on the latter; `mxfp8`, for Blackwell, is assumed.
FP8 = {
    "tensorwise": FP8Terms(0.85, 6),
    "delayed": FP8Terms(0.85, 4),
    "blockwise": FP8Terms(0.7, 6),
    "mxfp8": FP8Terms(0.85, 6),
}
# The backward pass of attention computes the scores again and four products from them, where the forward pass has two.
ATTENTION_BACKWARD = 2.5
_HEAD_WIDTHS = (64, 128, 256)  # for which attention has kernels on a GPU; others are as slow as the next one


@dataclass(frozen=True)
class HostTime:
    """Seconds of the host, forward and backward: per launched operation, and for a layer's Python code."""

    operation: Pair = (10e-6, 8e-6)  # torch's dispatcher, autograd and the driver: estimate
    layer: Pair = (900e-6, 500e-6)  # five modules of Transformer Engine of some 180 µs: estimate, 1.0 to 1.4 ms in all
    attention_call: float = 0.0  # beyond an operation's, where one layer calls attention for each window
    waits: bool = False  # whether vision layers read a number from the device, so that the host is never ahead


TE_HOST = HostTime()
TORCH_HOST = HostTime(layer=(100e-6, 0.0))  # modules without Transformer Engine's checks: estimate


def layer_terms(name: str, scenario: Scenario, hardware: Hardware, passes: MemoryPasses) -> dict[str, Pair]:
    """Return the device's seconds, forward and backward, by term. `passes` is used for a GPU only."""
    terms = work_terms(name, scenario, hardware)
    rates = hardware.forward.bandwidth, hardware.backward.bandwidth
    if scenario.on_gpu:
        moves = memory_traffic(name, scenario, passes)
    else:
        touched = touched_bytes(name, scenario)
        moves = {"other": (2 * touched, 4 * touched)}  # written once, read once; backward the same of two gradients
        calls = kind_in(scenario.model, name).calls(scenario.model)
        terms["calls"] = (calls * hardware.forward.overhead, calls * hardware.backward.overhead)
    terms |= {term: (pair[0] / rates[0], pair[1] / rates[1]) for term, pair in moves.items()}
    return terms if _has_backward(name, scenario) else {term: (pair[0], 0.0) for term, pair in terms.items()}


def work_terms(name: str, scenario: Scenario, hardware: Hardware) -> dict[str, Pair]:
    """Return the seconds of a layer's products and of its attention on one tensor-parallel rank."""
    faster = max(1.0, fp8_speed(hardware) * FP8[scenario.fp8_recipe].share) if name in scenario.fp8 else 1.0
    products, attention = rank_flops(name, scenario)
    products /= faster
    reached = scenario.gradient_reaches[scenario.names.index(name)]
    ahead, back = layer_kind(name).products(scenario, trained=scenario.trains(name), reached=reached)
    terms = {"products": (ahead * products / hardware.forward.matmul, back * products / hardware.backward.matmul)}
    if attention:
        again = ATTENTION_BACKWARD * attention
        terms["attention"] = (attention / hardware.forward.attention, again / hardware.backward.attention)
    if layer_cost(name, scenario.model, scenario.work).expert_flops:
        terms["experts"] = product_seconds(name, scenario, hardware, reached=reached, faster=faster)
    return terms


def rank_flops(name: str, scenario: Scenario) -> tuple[float, float]:
    """Return the forward FLOPs of a layer's products (without routed experts) and of its attention on one
    tensor-parallel rank, including the padding of heads and of head widths that kernels compute.
    """
    cost, tp = layer_cost(name, scenario.model, scenario.work), scenario.dims.tp
    attention = cost.attention_flops / tp
    padding = kind_in(scenario.model, name).padding(scenario.model, tp)
    products = cost.forward_flops / tp - attention - cost.expert_flops / tp
    if scenario.on_gpu and is_transformer(name):
        width = layer_sizes(name, scenario).width
        attention *= next((each for each in _HEAD_WIDTHS if each >= width), width) / width
    return products * padding[0], attention * padding[1]


def launch_seconds(name: str, scenario: Scenario, passes: MemoryPasses, host: HostTime) -> Pair:
    """Return the host's seconds to launch a layer's passes on a GPU; 0 on a CPU, which launches nothing."""
    if not scenario.on_gpu:
        return 0.0, 0.0
    python = host.layer if is_transformer(name) else (0.0, 0.0)
    issued = launches(name, scenario, passes)
    forward, backward = (n * each + more for n, each, more in zip(issued, host.operation, python, strict=True))
    return forward, backward * _has_backward(name, scenario)


def host_of(scenario: Scenario) -> HostTime:
    """Return the host's costs of launching the layers of a scenario."""
    return TE_HOST if scenario.te else TORCH_HOST


def _has_backward(name: str, scenario: Scenario) -> bool:
    return scenario.trains(name) or scenario.gradient_reaches[scenario.names.index(name)]


def product_seconds(name: str, scenario: Scenario, hardware: Hardware, *, reached: bool, faster: float = 1.0) -> Pair:
    """Return the forward and backward seconds of a layer's grouped products on the busiest rank.

    Each takes the longer of computing, `faster` times as fast as in bf16, and of moving the bytes of bf16 tensors.
    """
    routed = layer_sizes(name, scenario).routed
    assert routed is not None, name
    e, tile = scenario.bytes_each, hardware.rows_together
    ahead, back = (replace(rates, matmul=rates.matmul * faster) for rates in (hardware.forward, hardware.backward))
    once = routed.experts * 3 * routed.hidden * routed.ffn * e
    forward = _grouped(routed, ahead, tile=tile, weights=once, e=e)
    backward = 0.0
    if reached:
        backward += _grouped(routed, back, tile=tile, weights=once, e=e)
    if scenario.trains(name):  # rows are what is summed over: no tile of them is empty
        backward += _grouped(routed, back, tile=0.0, weights=once, e=e)
    return forward, backward


def _grouped(routed: RoutedRows, rates: Rates, *, tile: float, weights: float, e: int) -> float:
    """Return the seconds of the grouped gate, up and down products; `weights`: bytes of weights that they move."""
    flops = 2 * 3 * routed.hidden * routed.ffn * (routed.rows + routed.experts * tile / 2)
    rows = routed.rows * (2 * routed.hidden + 3 * routed.ffn) * e  # read and written by both products
    return max(flops / rates.matmul, (weights + rows) / rates.bandwidth)


def exchange_seconds(exchange: Exchange, hardware: Hardware) -> float:
    """Return the seconds of an exchange: an all-to-all, or an all-gather or reduce-scatter of all rows."""
    group = group_of(hardware, exchange.ranks, span=exchange.ranks * exchange.stride)
    return (all_to_all if exchange.to_each else ring_gather)(exchange.size, group)
