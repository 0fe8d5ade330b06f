"""What a layer costs beside its products: passes over memory by name, and the launches that the host issues.

A pass reads or writes a tensor once. `Passes` says how often a program does so, forward and backward, for each thing
between two products; one table per program, so that a fusion is a smaller number in one place. A test holds `TORCH`
against what a step on torch's layers moves, counted on a device that is not there. Transformer Engine's and fused
numbers are read from its kernels' arguments; launches and seconds of the host are estimates until a GPU has said them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from megavlm.config.derived import query_groups
from megavlm.model.flops import head_width
from megavlm.planner.case import Case
from megavlm.planner.layers import LANGUAGE_LAYER, OUTPUT, VISION_LAYER
from megavlm.planner.parameters import local_parameters, vocabulary_shard

Pair = tuple[float, float]  # forward, backward


@dataclass(frozen=True)
class Update:
    """Bytes that a step's end moves for each trained number of a rank: gradients in fp32, weights in bf16."""

    zero: float = 4  # written
    over_tokens: float = 8  # ÷ trained tokens: read, written
    norm: float = 4  # read
    clip: float = 8  # read, written
    adam: float = 28  # gradient, master and two moments read, all but the gradient written
    copy: float = 6  # master read, weight written

    @property
    def total(self) -> float:
        return float(sum(vars(self).values()))


@dataclass(frozen=True)
class Passes:
    """Passes of a transformer layer over tensors of the width named, and bytes of what is counted otherwise."""

    norm: Pair = (2, 3)  # hidden, two a layer: forward read, written; backward gradient and input read, one written
    residual: Pair = (3, 3)  # hidden, two a layer: two read and one written, each way
    rotation: Pair = (5, 5)  # queries and keys: x·cos, then a multiply-add on each half. Fused: 2
    qkv_split: Pair = (0, 2)  # queries, keys, values: their gradients are written into one tensor. Fused: 0
    rotation_splits: bool = False  # one function splits and turns: nothing is joined, values are copied, not queries
    slices: Pair = (0, 0)  # the same: attention that cuts samples out of a row fills and writes whole gradients
    query_copy: Pair = (2, 0)  # queries, where several share a key: megatron-core makes them contiguous
    value_copy: Pair = (0, 0)  # values: what an attention kernel wants contiguous, and its gradient
    swiglu: Pair = (5, 13)  # width of the MLP: silu, product; two products, silu's gradient, both halves joined
    quick_gelu: Pair = (7, 14)  # the same: 1.702x, σ, product; and their gradients, added up
    gelu: Pair = (2, 3)  # the same
    bias: Pair = (2, 1)  # each output with a bias: added; its gradient summed. Inside the product: 0
    weight_gradient: float = 10  # bytes a trained number: fp32 sum read and written, bf16 gradient read. Fused: 0
    output_weight_gradient: float = 10  # the same of the output layer, whose product is megatron-core's
    cross_entropy: Pair = (42, 26)  # bytes a logit, forward and backward
    fp8_cast: Pair = (4, 4)  # bytes of a product's input, and of its output's gradient: bf16 read, two copies written
    update: Update = Update()
    launches_language: Pair = (21, 39)
    launches_vision: Pair = (16, 38)
    launches_output: Pair = (36, 11)
    windows_batched: bool = True  # False: one call over all sequences, tiled for as many as the longest could be


# torch's layers, as `benchmarks/host_time.py` counts them: at f4fb872, and today. Attention cuts samples out of a row;
# activations keep their input alone and compute the rest anew.
TORCH_BEFORE = Passes(slices=(0, 2))
TORCH = replace(TORCH_BEFORE, swiglu=(5, 11), quick_gelu=(7, 5), rotation_splits=True)
# Transformer Engine's layers at f4fb872: norms inside linear layers, biases of queries, keys and values too, the rest
# as torch's. Launches: products, norms, cuDNN's attention with its two helpers, and what is not fused.
BEFORE = replace(
    TORCH_BEFORE,
    slices=(0, 0),
    value_copy=(2, 2),
    launches_language=(28, 45),
    launches_vision=(24, 42),
    windows_batched=False,
)
# What main has of it today. The loss is Transformer Engine's kernel: logits read twice, their gradient written once and
# multiplied by what comes from above. So are activations, and the rotation with its split, one kernel each way; biases
# and sums of weight gradients are inside products, dividing and clipping inside the update.
NOW = replace(
    BEFORE,
    rotation=(2, 2),
    rotation_splits=True,
    qkv_split=(0, 0),
    cross_entropy=(6, 4),
    swiglu=(3, 5),
    quick_gelu=(2, 3),
    bias=(0, 0),
    weight_gradient=0,
    update=Update(over_tokens=0, clip=0, adam=32),  # divided gradients are written back
    launches_language=(13, 21),
    launches_vision=(13, 26),
    launches_output=(16, 8),
    windows_batched=True,
)
# With everything fused that this model knows of.
POSSIBLE = replace(NOW, output_weight_gradient=0, update=Update(over_tokens=0, clip=0, copy=2))


@dataclass(frozen=True)
class Moved:
    """Bytes of one layer's passes by term, forward and backward."""

    terms: dict[str, Pair]

    @property
    def forward(self) -> float:
        return sum(pair[0] for pair in self.terms.values())

    @property
    def backward(self) -> float:
        return sum(pair[1] for pair in self.terms.values())


def moved(name: str, case: Case, passes: Passes, *, te: bool) -> Moved:
    """What a transformer layer, a lone norm or the output moves beside its products, on one rank without TP."""
    language, e = case.model.language, case.bytes_each
    weights = local_parameters(name, case.model, case.dims.tp)
    each = passes.output_weight_gradient if name == OUTPUT else passes.weight_gradient
    added: dict[str, Pair] = {"weight gradients": (0.0, each * weights * case.trains(name))}
    if name == OUTPUT:
        logits = case.work.tokens * vocabulary_shard(case.model, case.dims.tp) / language.hidden_size
        return Moved({"cross entropy": _times(passes.cross_entropy, logits), **added})
    seeing = name.startswith(VISION_LAYER)
    if not (seeing or name.startswith(LANGUAGE_LAYER)):
        tokens = case.work.tokens
        return Moved({"norms": _times(passes.norm, tokens * language.hidden_size * e), **added})
    if seeing:
        vision, tokens = case.model.vision, case.work.patches
        hidden = queries = keys = vision.hidden_size
        ffn, activation = vision.ffn_hidden_size, vision.activation
        rotated = vision.position_embedding != "learned"
        biased = 3 * hidden * vision.add_qkv_bias * (not te)
        biased += ((1 + (activation == "swiglu")) * ffn + 2 * hidden) * vision.add_bias_linear
    else:
        tokens, hidden, width = case.work.tokens, language.hidden_size, head_width(language)
        queries = language.num_attention_heads * width
        keys = query_groups(language) * width
        ffn, activation, rotated = language.ffn_hidden_size, "swiglu", True
        biased = (queries + 2 * keys) * language.add_qkv_bias * (not te)
    together = rotated and passes.rotation_splits
    terms = {
        "norms": _times(passes.norm, 2 * hidden),
        "residuals": _times(passes.residual, 2 * hidden),
        "rotation": _times(passes.rotation, (queries + keys) * rotated),
        "QKV split": _times(passes.qkv_split, (queries + 2 * keys) * (not together)),
        "slices of samples": _times(passes.slices, queries + 2 * keys),
        "copies of queries": _times(passes.query_copy, queries * (keys < queries) * (not together)),
        "copies of values": _times((2, 2) if together else passes.value_copy, keys),
        "activation": _times(_activation(passes, activation), ffn),
        "biases": _times(passes.bias, biased),
    }
    if name in case.fp8:
        gates = 2 if activation == "swiglu" else 1
        inputs = 2 * hidden + queries + ffn
        outputs = queries + 2 * keys + 2 * hidden + gates * ffn
        terms["casts to FP8"] = (passes.fp8_cast[0] * inputs / e, passes.fp8_cast[1] * outputs / e)
    return Moved({term: _times(pair, tokens * e) for term, pair in terms.items() if any(pair)} | added)


def _activation(passes: Passes, kind: str) -> Pair:
    return {"swiglu": passes.swiglu, "quick_gelu": passes.quick_gelu}.get(kind, passes.gelu)


def _times(pair: Pair, factor: float) -> Pair:
    return pair[0] * factor, pair[1] * factor


def update_bytes(trained: float, passes: Passes) -> float:
    """What the end of a step moves on a rank that trains so many numbers."""
    return trained * passes.update.total
