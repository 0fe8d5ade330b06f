"""Bytes that one micro-batch leaves behind in each layer for its backward pass, on one tensor-parallel rank.

The lists follow what autograd saves in `model/`: a test counts the tensors that torch keeps. Legend: t tokens of this
rank between TP regions (sharded under sequence parallelism), T tokens inside them, e bytes of a number.
"""

from __future__ import annotations

from megavlm.arch.flops import head_width
from megavlm.arch.layers import (
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
from megavlm.config.derived import projector_width, query_groups, vocab_size
from megavlm.config.schema import LanguageConfig, VisionConfig
from megavlm.planner.scenario import Recompute, Scenario

FP32 = 4


def saved_bytes(name: str, scenario: Scenario, recompute: Recompute = "none") -> float:
    """What stays until backward; nothing where no gradient passes the layer."""
    trained = scenario.trains(name)
    if not trained and not scenario.gradient_reaches[scenario.names.index(name)]:
        return 0.0
    e, vision, language = scenario.bytes_each, scenario.model.vision, scenario.model.language
    if name.startswith((VISION_LAYER, LANGUAGE_LAYER)):
        if recompute == "full":
            return hidden_bytes(name, scenario)
        return layer_sizes(name, scenario).saved(trained=trained, core_attention=recompute == "selective")
    if name == PATCH_EMBED:
        norm = _norm_bytes(scenario, scenario.work.patches, vision.hidden_size, vision.normalization) * vision.pre_norm
        return scenario.work.patches * vision.in_channels * vision.patch_size**2 * e + norm
    if name == VISION_NORM:
        used = vision.post_norm and vision.feature_layer == -1
        tokens = scenario.work.patches / scenario.sequence_shards
        return _norm_bytes(scenario, tokens, vision.hidden_size, vision.normalization) if used else 0.0
    if name == PROJECTOR or name.startswith(DEEPSTACK):
        merged = scenario.work.patches * vision.hidden_size * e
        normed = name != PROJECTOR or scenario.model.projector.input_norm
        hidden = projector_width(scenario.model)
        inner = (
            0 if scenario.model.projector.kind == "linear" else 2 * scenario.features * hidden / scenario.dims.tp * e
        )
        return merged * (trained + normed) + inner + scenario.work.patches * 8
    if name == EMBEDDING:
        return scenario.features * language.hidden_size * e + (scenario.work.tokens + scenario.features) * 8
    if name == LANGUAGE_NORM:
        return _norm_bytes(scenario, scenario.work.tokens / scenario.sequence_shards, language.hidden_size, "RMSNorm")
    assert name == OUTPUT
    position = columns(scenario) * e + 3 * FP32 + 5  # logits, their largest and the sum; which column is the label's
    return scenario.work.tokens * (language.hidden_size / scenario.sequence_shards * e * trained + position)


def hidden_bytes(name: str, scenario: Scenario) -> float:
    """The tensor that enters a layer, as one tensor-parallel rank holds it (and passes it on between chunks)."""
    e, model = scenario.bytes_each, scenario.model
    if name == EMBEDDING:
        return scenario.features * model.language.hidden_size * e
    if module_of(name) == "vision" or name == PROJECTOR or name.startswith(DEEPSTACK):
        return scenario.work.patches * model.vision.hidden_size * e / scenario.sequence_shards
    return scenario.work.tokens * model.language.hidden_size * e / scenario.sequence_shards


def columns(scenario: Scenario) -> int:
    """Of the logits that a tensor-parallel rank holds."""
    return -(-vocab_size(scenario.model.language) // scenario.dims.tp)


def _norm_bytes(scenario: Scenario, tokens: float, width: int, kind: str) -> float:
    """A norm's input. In steps (on CPU), an RMS norm keeps x and x̂ of fp32 instead."""
    if kind == "LayerNorm" or scenario.on_gpu:
        return tokens * (width * scenario.bytes_each + 8)
    return tokens * (2 * width + 1) * FP32


def layer_sizes(name: str, scenario: Scenario) -> LayerSizes:
    """Sizes of a transformer layer's tensors on one rank."""
    if name.startswith(VISION_LAYER):
        return LayerSizes(scenario.model.vision, scenario)
    return _LanguageLayerSizes(scenario.model.language, scenario)


class LayerSizes:
    """Sizes of a vision layer's tensors on one rank."""

    def __init__(self, vision: VisionConfig, scenario: Scenario) -> None:
        self.scenario, self.tokens, self.hidden = scenario, scenario.work.patches, vision.hidden_size
        width = vision.hidden_size // vision.num_attention_heads
        self.heads = self.groups = -(-vision.num_attention_heads // scenario.dims.tp)
        self.width, self.ffn = width, vision.ffn_hidden_size / scenario.dims.tp
        self.norm, self.activation = vision.normalization, vision.activation
        self.qkv_bias, self.linear_bias = vision.add_qkv_bias, vision.add_bias_linear
        self.rotated = vision.position_embedding != "learned"
        self.qk_norm = vision.qk_norm != "none"
        self.scaled = vision.layer_scale
        self.inner = 1 + (vision.activation == "swiglu")  # widths of the MLP that the activation keeps, its input's

    def saved(self, *, trained: bool, core_attention: bool) -> float:
        scenario, e, T = self.scenario, self.scenario.bytes_each, self.tokens
        t = T / scenario.sequence_shards
        norms = 2 * _norm_bytes(scenario, t, self.hidden, self.norm)
        linear_inputs = (2 * t * self.hidden + T * self.ffn) * e * trained
        queries_and_keys = T * (self.heads + self.groups) * self.width
        attention = (T * (2 * self.heads + 2 * self.groups) * self.width) * e  # q, k, v and the output
        attention += T * self.heads * FP32 * (not core_attention)  # log of the sums that softmax divides by
        if self.qk_norm:  # what the norms read, beside what attention reads
            attention += queries_and_keys * e
        if self.qk_norm and not scenario.on_gpu:
            attention += queries_and_keys * FP32 * (1 if e == FP32 else 2)
        return norms + linear_inputs + attention + T * self.inner * self.ffn * e + 2 * t * self.hidden * e * self.scaled


class _LanguageLayerSizes(LayerSizes):
    """The same of a language layer."""

    def __init__(self, language: LanguageConfig, scenario: Scenario) -> None:
        tp, heads = scenario.dims.tp, language.num_attention_heads
        self.scenario, self.tokens, self.hidden = scenario, scenario.work.tokens, language.hidden_size
        self.heads, self.width = heads // tp, head_width(language)
        self.groups = max(1, query_groups(language) // tp)
        self.ffn, self.inner = language.ffn_hidden_size / tp, 2
        self.norm, self.activation = "RMSNorm", "swiglu"
        self.qkv_bias, self.linear_bias = language.add_qkv_bias, False
        self.rotated, self.qk_norm, self.scaled = True, language.qk_norm, False
