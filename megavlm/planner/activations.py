"""Bytes that one micro-batch leaves behind in each layer for its backward pass, on one tensor-parallel rank.

The lists follow what autograd saves in `model/`: a test counts the tensors that torch keeps. Legend: t tokens of this
rank between TP regions (sharded under sequence parallelism), T tokens inside them, e bytes of a number.
"""

from __future__ import annotations

from megavlm.config.derived import projector_width, query_groups, vocab_size
from megavlm.config.schema import LanguageConfig, VisionConfig
from megavlm.model.flops import head_width
from megavlm.planner.case import Case, Recompute
from megavlm.planner.layers import (
    DEEPSTACK,
    EMBEDDING,
    LANGUAGE_LAYER,
    LANGUAGE_NORM,
    OUTPUT,
    PATCH_EMBED,
    PROJECTOR,
    VISION_LAYER,
    VISION_NORM,
    module_of,
)

FP32 = 4


def saved_bytes(name: str, case: Case, recompute: Recompute = "none") -> float:
    """What stays until backward; nothing where no gradient passes the layer."""
    trained = case.trains(name)
    if not trained and not case.gradient_reaches[case.names.index(name)]:
        return 0.0
    e, vision, language = case.bytes_each, case.model.vision, case.model.language
    if name.startswith((VISION_LAYER, LANGUAGE_LAYER)):
        if recompute == "full":
            return hidden_bytes(name, case)
        return layer_sizes(name, case).saved(trained=trained, core_attention=recompute == "selective")
    if name == PATCH_EMBED:
        norm = _norm_bytes(case, case.work.patches, vision.hidden_size, vision.normalization) * vision.pre_norm
        return case.work.patches * vision.in_channels * vision.patch_size**2 * e + norm
    if name == VISION_NORM:
        used = vision.post_norm and vision.feature_layer == -1
        tokens = case.work.patches / case.sequence_shards
        return _norm_bytes(case, tokens, vision.hidden_size, vision.normalization) if used else 0.0
    if name == PROJECTOR or name.startswith(DEEPSTACK):
        merged = case.work.patches * vision.hidden_size * e
        normed = name != PROJECTOR or case.model.projector.input_norm
        hidden = projector_width(case.model)
        inner = 0 if case.model.projector.kind == "linear" else 2 * case.features * hidden / case.dims.tp * e
        return merged * (trained + normed) + inner + case.work.patches * 8
    if name == EMBEDDING:
        return case.features * language.hidden_size * e + (case.work.tokens + case.features) * 8
    if name == LANGUAGE_NORM:
        return _norm_bytes(case, case.work.tokens / case.sequence_shards, language.hidden_size, "RMSNorm")
    assert name == OUTPUT
    position = columns(case) * e + 3 * FP32 + 5  # logits, their largest and the sum; which column is the label's
    return case.work.tokens * (language.hidden_size / case.sequence_shards * e * trained + position)


def hidden_bytes(name: str, case: Case) -> float:
    """The tensor that enters a layer, as one tensor-parallel rank holds it (and passes it on between chunks)."""
    e, model = case.bytes_each, case.model
    if name == EMBEDDING:
        return case.features * model.language.hidden_size * e
    if module_of(name) == "vision" or name == PROJECTOR or name.startswith(DEEPSTACK):
        return case.work.patches * model.vision.hidden_size * e / case.sequence_shards
    return case.work.tokens * model.language.hidden_size * e / case.sequence_shards


def columns(case: Case) -> int:
    """Of the logits that a tensor-parallel rank holds."""
    return -(-vocab_size(case.model.language) // case.dims.tp)


def _norm_bytes(case: Case, tokens: float, width: int, kind: str) -> float:
    """A norm's input. In steps (on CPU), an RMS norm keeps x and x̂ of fp32 instead."""
    if kind == "LayerNorm" or case.on_gpu:
        return tokens * (width * case.bytes_each + 8)
    return tokens * (2 * width + 1) * FP32


def layer_sizes(name: str, case: Case) -> LayerSizes:
    """Sizes of a transformer layer's tensors on one rank."""
    if name.startswith(VISION_LAYER):
        return LayerSizes(case.model.vision, case)
    return _LanguageLayerSizes(case.model.language, case)


class LayerSizes:
    """Sizes of a vision layer's tensors on one rank."""

    def __init__(self, vision: VisionConfig, case: Case) -> None:
        self.case, self.tokens, self.hidden = case, case.work.patches, vision.hidden_size
        width = vision.hidden_size // vision.num_attention_heads
        self.heads = self.groups = -(-vision.num_attention_heads // case.dims.tp)
        self.width, self.ffn = width, vision.ffn_hidden_size / case.dims.tp
        self.norm, self.activation = vision.normalization, vision.activation
        self.qkv_bias, self.linear_bias = vision.add_qkv_bias, vision.add_bias_linear
        self.rotated = vision.position_embedding != "learned"
        self.qk_norm = vision.qk_norm != "none"
        self.scaled = vision.layer_scale
        self.inner = 1 + (vision.activation == "swiglu")  # widths of the MLP that the activation keeps, its input's

    def saved(self, *, trained: bool, core_attention: bool) -> float:
        case, e, T = self.case, self.case.bytes_each, self.tokens
        t = T / case.sequence_shards
        norms = 2 * _norm_bytes(case, t, self.hidden, self.norm)
        linear_inputs = (2 * t * self.hidden + T * self.ffn) * e * trained
        queries_and_keys = T * (self.heads + self.groups) * self.width
        attention = (T * (2 * self.heads + 2 * self.groups) * self.width) * e  # q, k, v and the output
        attention += T * self.heads * FP32 * (not core_attention)  # log of the sums that softmax divides by
        if self.qk_norm:  # what the norms read, beside what attention reads
            attention += queries_and_keys * e
        if self.qk_norm and not case.on_gpu:
            attention += queries_and_keys * FP32 * (1 if e == FP32 else 2)
        return norms + linear_inputs + attention + T * self.inner * self.ffn * e + 2 * t * self.hidden * e * self.scaled


class _LanguageLayerSizes(LayerSizes):
    """The same of a language layer."""

    def __init__(self, language: LanguageConfig, case: Case) -> None:
        tp, heads = case.dims.tp, language.num_attention_heads
        self.case, self.tokens, self.hidden = case, case.work.tokens, language.hidden_size
        self.heads, self.width = heads // tp, head_width(language)
        self.groups = max(1, query_groups(language) // tp)
        self.ffn, self.inner = language.ffn_hidden_size / tp, 2
        self.norm, self.activation = "RMSNorm", "swiglu"
        self.qkv_bias, self.linear_bias = language.add_qkv_bias, False
        self.rotated, self.qk_norm, self.scaled = True, language.qk_norm, False
