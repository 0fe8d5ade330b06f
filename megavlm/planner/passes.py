"""What a layer costs beside its products: passes over memory by name, and the launches that the host issues.

A pass reads or writes a tensor once. `MemoryPasses` counts the passes of each operation between two matrix products,
forward and backward, for one implementation of the layers; fusing an operation changes one number. A test compares
`TORCH` with the bytes that a step on torch's layers moves on the fake device. The counts of Transformer Engine and of
fused kernels come from the arguments of their kernels; launches and host seconds are estimates.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from megavlm.arch.kind import FP32
from megavlm.arch.kinds import (
    KINDS,
    hidden_bytes,
    is_transformer,
    layer_kind,
    layer_sizes,
    layout_parameters,
    rank_parameters,
    saved_bytes,
)
from megavlm.arch.language_ends import LOSS_WORK, computes_logits_again, logit_columns
from megavlm.arch.layers import (
    EMBEDDING,
    LANGUAGE_LAYER,
    LANGUAGE_NORM,
    OUTPUT,
    TRANSFORMER_LAYERS,
    VISION_LAYER,
    kind_of,
)
from megavlm.arch.scenario import Scenario
from megavlm.arch.transformer import LayerSizes

Pair = tuple[float, float]  # forward, backward


@dataclass(frozen=True)
class Update:
    """Bytes that a step's end moves for each trained number of a rank: gradients in fp32, weights in bf16."""

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
    """Passes of a transformer layer over tensors of the width named, and bytes of what is counted otherwise."""

    norm: Pair = (2, 3)  # hidden, two a layer: forward read, written; backward gradient and input read, one written
    residual: Pair = (3, 3)  # hidden, two a layer: two read and one written, each way
    rotation: Pair = (5, 5)  # queries and keys: x·cos, then a multiply-add on each half. Fused: 2
    qkv_split: Pair = (0, 2)  # queries, keys, values: their gradients are written into one tensor. Fused: 0
    rotation_splits: bool = False  # one function splits and turns: nothing is joined, values are copied, not queries
    query_copy: Pair = (2, 0)  # queries, where several share a key: megatron-core makes them contiguous
    value_copy: Pair = (0, 0)  # values: what an attention kernel wants contiguous, and its gradient
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
    fp8_cast: Pair = (4, 4)  # bytes of a product's input, and of its output's gradient: bf16 read, two copies written
    update: Update = Update()
    launches_language: Pair = (21, 39)
    launches_vision: Pair = (16, 38)
    launches_experts: Pair = (40, 50)  # beyond a language layer's: router, sorting, grouped products: estimate
    launches_output: Pair = (36, 11)
    launches_loss_piece: Pair = (0, 0)  # beyond those, for each piece of the logits that the loss is computed in
    launches_again_piece: int = 10  # the same backward, where logits are computed again


# torch's layers, as `benchmarks/host_time.py` counts them. Activations keep their input and compute the rest anew.
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
# The same with `--compile-small-ops`: one kernel for each way of an activation, and of rotation with its split.
_TORCH_COMPILED = replace(
    TORCH, swiglu=(3, 5), quick_gelu=(2, 3), rotation=(2, 2), launches_language=(11, 21), launches_vision=(14, 31)
)
# Transformer Engine's layers: norms inside linear layers. The loss is its kernel: logits read twice, their gradient
# written once and multiplied by what comes from above. So are activations, and the rotation with its split, one kernel
# each way; biases and sums of weight gradients are inside products, dividing and clipping inside the update. Launches:
# products, norms, cuDNN's attention with its two helpers, and what is not fused.
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
# The same where products do not add weight gradients to their sums: Transformer Engine's own kernels do that alone.
_NOW_ADDING = replace(NOW, weight_gradient=10)


@dataclass(frozen=True)
class MemoryTraffic:
    """The bytes of one layer's passes by term, forward and backward."""

    terms: dict[str, Pair]

    @property
    def forward(self) -> float:
        return sum(pair[0] for pair in self.terms.values())

    @property
    def backward(self) -> float:
        return sum(pair[1] for pair in self.terms.values())


def program_of(scenario: Scenario) -> MemoryPasses:
    """Return the passes of the layers that a scenario runs on a GPU: Transformer Engine's, or torch's."""
    if not scenario.te:
        return _TORCH_COMPILED if scenario.compiled_small_ops else TORCH
    fused = scenario.fused_gradients and not scenario.shards_gradients and "activations" not in scenario.offload
    return NOW if fused and scenario.dims.order != "zb-h1" else _NOW_ADDING


def memory_traffic(name: str, scenario: Scenario, passes: MemoryPasses) -> MemoryTraffic:
    """Return what a layer moves beside its products, on one rank.

    Under tensor parallelism a rank has its share of what lies inside the two blocks of a transformer layer, for all
    tokens, and all of what lies between them: for its share of the tokens with sequence parallelism, else for all.
    """
    e, trained = scenario.bytes_each, scenario.trains(name)
    transformer = is_transformer(name)
    if transformer or name == LANGUAGE_NORM:
        each = passes.weight_gradient
    else:
        each = passes.output_weight_gradient + 2 * (name == EMBEDDING)  # whose gradient is zeroed before rows are added
    own = layout_parameters(name, scenario) * trained
    experts = rank_parameters(name, scenario) * trained - own
    summed = each * own + passes.expert_weight_gradient * experts
    added: dict[str, Pair] = {"weight gradients": (0.0, summed)} if summed else {}
    if transformer:
        terms = _of_layer(layer_sizes(name, scenario), scenario, passes, trained=trained, fp8=name in scenario.fp8)
        return MemoryTraffic({term: _times(pair, e) for term, pair in terms.items() if any(pair)} | added)
    if name == OUTPUT:
        ahead, back = passes.cross_entropy
        if computes_logits_again(scenario):
            back = passes.cross_entropy_again * trained
        loss = _times((ahead, back), scenario.work.trained_tokens * logit_columns(scenario))
        return MemoryTraffic({"cross entropy": loss, **added})
    if name == LANGUAGE_NORM:
        return MemoryTraffic({"norms": _times(passes.norm, hidden_bytes(name, scenario)), **added})
    touched = touched_bytes(name, scenario) if layer_kind(name).is_present(scenario.model) else 0.0
    return MemoryTraffic({"other": (2 * touched, 4 * touched), **added})


def _of_layer(
    sizes: LayerSizes, scenario: Scenario, passes: MemoryPasses, *, trained: bool, fp8: bool
) -> dict[str, Pair]:
    """Return the number of elements that a transformer layer's passes move."""
    inside, between = sizes.tokens, sizes.tokens / scenario.sequence_shards
    hidden, ffn, gates = sizes.hidden * between, sizes.ffn * inside, sizes.inner
    queries, keys = sizes.heads * sizes.width * inside, sizes.groups * sizes.width * inside
    together = sizes.rotated and passes.rotation_splits
    biased = (gates * ffn + 2 * hidden) * sizes.linear_bias
    biased += (queries + 2 * keys) * sizes.qkv_bias * (not passes.qkv_bias_inside)
    terms = {
        "norms": _times(passes.norm, (4 if sizes.post_norms else 2) * hidden),
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
        terms["casts to FP8"] = (
            passes.fp8_cast[0] * inputs / scenario.bytes_each,
            passes.fp8_cast[1] * outputs / scenario.bytes_each,
        )
    return terms


def touched_bytes(name: str, scenario: Scenario) -> float:
    """Return the bytes that a forward pass writes: as many as it would save if everything were trained and kept."""
    everything = frozenset(scenario.names)
    kept = replace(scenario, own=everything, trained=everything, loss_chunk=scenario.work.tokens)
    return saved_bytes(name, kept) + hidden_bytes(name, scenario)


def launches(name: str, scenario: Scenario, passes: MemoryPasses) -> Pair:
    """Return the operations that the host issues for a layer, forward and backward."""
    kind = kind_of(name)
    if kind in TRANSFORMER_LAYERS:
        each = {VISION_LAYER: passes.launches_vision, LANGUAGE_LAYER: passes.launches_language}[kind]
        more = passes.launches_experts if layer_sizes(name, scenario).routed is not None else (0, 0)
        return each[0] + more[0], each[1] + more[1]
    if kind == OUTPUT:
        pieces = scenario.work.trained_tokens * logit_columns(scenario) * FP32 / LOSS_WORK
        again = passes.launches_again_piece * (computes_logits_again(scenario) and scenario.trains(name))
        ahead, back = passes.launches_output
        return ahead + passes.launches_loss_piece[0] * pieces, back + (passes.launches_loss_piece[1] + again) * pieces
    return KINDS[kind].kernels(scenario.model) if KINDS[kind].is_present(scenario.model) else (0.0, 0.0)


def _activation(passes: MemoryPasses, kind: str) -> Pair:
    return {"swiglu": passes.swiglu, "geglu": passes.swiglu, "quick_gelu": passes.quick_gelu}.get(kind, passes.gelu)


def _times(pair: Pair, factor: float) -> Pair:
    return pair[0] * factor, pair[1] * factor
