"""Sizes of a transformer layer's tensors on one rank, and what it saves for its backward pass."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from megavlm.arch.kind import FP32, norm_bytes
from megavlm.arch.scenario import Scenario
from megavlm.arch.tensor_split import DeltaSplit, delta_split, language_split, mlp_share, share_of, vision_split
from megavlm.config.derived import masks_attention, norms_of_layer
from megavlm.config.schema import LanguageConfig, VisionConfig


@dataclass(frozen=True)
class RoutedRows:
    """Work of the routed experts of one rank in a pass. A token has one row for each of its experts on the rank."""

    rows: float
    experts: int  # that the rank holds, whole or a share of each
    hidden: int
    ffn: float  # width of an expert, or of the rank's share of it
    moved: float  # rows that the rank sends on behalf of its own tokens


class LayerSizes:
    """Sizes of a vision layer's tensors on one rank, in elements."""

    routed: RoutedRows | None = None  # of a mixture of experts
    gated = False  # whether attention's output is multiplied by a projection of the input
    read = 2  # different tensors that attention and MLP read

    def __init__(self, vision: VisionConfig, scenario: Scenario) -> None:
        self.scenario, self.tokens, self.hidden = scenario, scenario.work.patches, vision.hidden_size
        split = vision_split(vision, scenario.dims.tp)
        self.heads, self.groups, self.width = split.local_heads, split.slots, split.width
        self.ffn = mlp_share(vision.ffn_hidden_size, scenario.dims.tp)
        self.discards = split.discards  # whether attention's output for padding query heads is discarded
        self.norm: str = vision.normalization
        self.activation: str = vision.activation
        self.qkv_bias, self.linear_bias = vision.add_qkv_bias, vision.add_bias_linear
        self.rotated = vision.position_embedding != "learned"
        self.qk_norm = vision.qk_norm != "none"
        self.scaled, self.norms = vision.layer_scale, 2
        self.keys_kept, self.copies = self.groups, 1  # key heads that attention saves
        self.inner = 1 + (vision.activation == "swiglu")  # inputs of the activation, in widths of the MLP

    def saved(self, *, trained: bool, core_attention: bool) -> float:
        """Return the bytes that the layer saves for its backward pass."""
        scenario, e, T = self.scenario, self.scenario.bytes_each, self.tokens
        t = T / scenario.sequence_shards
        norms = self.norms * norm_bytes(scenario, t, self.hidden, self.norm)
        linear_inputs = (self.read * t * self.hidden + T * self.ffn) * e * trained
        attention = self.attention_saved(trained=trained, core_attention=core_attention)
        return norms + linear_inputs + attention + T * self.inner * self.ffn * e + 2 * t * self.hidden * e * self.scaled

    def attention_saved(self, *, trained: bool, core_attention: bool) -> float:
        """Return the bytes that attention saves between its two projections, the input of the second included."""
        scenario, e, T = self.scenario, self.scenario.bytes_each, self.tokens
        queries_and_keys = T * (self.heads + self.groups) * self.width
        attention = (T * (2 * self.heads + 2 * self.keys_kept) * self.width) * e  # q, k, v and the output
        attention += T * self.heads * FP32 * (not core_attention)  # log of the sums that softmax divides by
        if scenario.dims.cp > 1 and not core_attention:  # after the exchange: repeated keys, and another output
            keys = self.keys_kept * (self.copies * scenario.dims.cp_groups - 1)
            attention += T * (2 * keys + self.heads * trained) * self.width * e
        if self.discards and not core_attention:  # the output before padding heads are discarded
            attention += T * self.heads * trained * self.width * e
        if self.qk_norm:  # inputs of the norms, beside those of attention
            attention += queries_and_keys * e
        if self.gated:  # of each query channel the gate, its sigmoid in fp32, and what it multiplies in fp32
            attention += T * self.heads * self.width * (e + 2 * FP32)
        if self.qk_norm and not scenario.on_gpu:
            attention += queries_and_keys * FP32 * (1 if e == FP32 else 2)
        return attention

    def waiting(self) -> float:
        """Return the bytes that delayed weight gradients need: inputs of four linear layers and gradients of their
        outputs. Sequence parallelism shards the inputs of the first and the third, but not with Transformer Engine.
        """
        T, t = self.tokens, self.tokens / (1 if self.scenario.te else self.scenario.sequence_shards)
        inputs = self.read * t * self.hidden + T * (self.heads * self.width + self.ffn)
        outputs = T * ((self.heads + 2 * self.groups) * self.width + self.inner * self.ffn + 2 * self.hidden)
        return (inputs + outputs) * self.scenario.bytes_each


class LanguageLayerSizes(LayerSizes):
    """Sizes of a language layer's tensors on one rank, in elements."""

    delta: DeltaSplit | None = None  # of linear attention

    def __init__(self, language: LanguageConfig, scenario: Scenario, *, linear: bool) -> None:
        tp = scenario.dims.tp
        self.delta = delta_split(language, tp) if linear else None
        split = language_split(language, tp) if self.delta is None else self.delta.heads
        self.scenario, self.tokens, self.hidden = scenario, scenario.work.tokens, language.hidden_size
        self.heads, self.groups, self.width = split.local_heads, split.slots, split.width
        self.discards, self.gated = split.discards, split.gated
        self.ffn, self.inner = mlp_share(language.ffn_hidden_size, tp), 2
        self.norm, self.activation = language.normalization, language.activation
        self.qkv_bias, self.linear_bias = language.add_qkv_bias, False
        self.rotated, self.qk_norm, self.scaled = not linear, language.qk_norm and not linear, False
        self.norms, self.read = norms_of_layer(language), 2 - language.parallel_block
        exchanging = scenario.dims.row_split.heads
        self.copies = exchanging // gcd(self.groups, exchanging)
        self.keys_kept = self.heads if masks_attention(language) else self.groups  # masks repeat them for their queries

    def attention_saved(self, *, trained: bool, core_attention: bool) -> float:
        """Return also what linear attention saves: what the convolution and the rule read, and around its norm."""
        if self.delta is None:
            return super().attention_saved(trained=trained, core_attention=core_attention)
        e, split = self.scenario.bytes_each, self.delta
        values = self.heads * split.width
        keys = self.groups * self.width
        # Input of the convolution; values in its output, queries and keys of every value head; β and decay.
        rule = (values + 2 * keys) * e + (values + 2 * keys + 2 * self.heads * self.width) * e
        rule += self.heads * (2 * e + 3 * FP32)
        # The output before and after its norm, the gate and its SiLU in fp32, and the second projection's input.
        norm = values * (2 * e + e * trained + 2 * FP32)
        norm += values * FP32 * (not self.scenario.on_gpu) * (e != FP32)
        exchanged = values * 2 * e * (self.scenario.dims.cp > 1)
        return self.tokens * (rule + norm + exchanged)


class MixtureSizes(LanguageLayerSizes):
    """Sizes of a layer whose MLP is a shared expert beside routed experts."""

    def __init__(self, scenario: Scenario, *, linear: bool) -> None:
        model, dims = scenario.model, scenario.dims
        super().__init__(model.language, scenario, linear=linear)
        experts = model.experts
        self.ffn = share_of(experts.shared_ffn_hidden_size or 0, dims.tp)
        moved = self.tokens / scenario.sequence_shards * experts.router_topk * scenario.busiest
        self.routed = RoutedRows(
            rows=moved * dims.expert_tp,
            experts=experts.num_experts // dims.ep,
            hidden=self.hidden,
            ffn=experts.ffn_hidden_size / dims.expert_tp,
            moved=moved,
        )

    def saved(self, *, trained: bool, core_attention: bool) -> float:
        """Return the bytes with a shared expert as the MLP, and beside it for each row the inputs of both products and
        of the activation, output, weight and index; for each token, the router's choice and scores.
        """
        rest, routed = super().saved(trained=trained, core_attention=core_attention), self.routed
        assert routed is not None
        scenario, experts = self.scenario, self.scenario.model.experts
        wide = (routed.hidden + routed.ffn) * trained + (self.inner + 1) * routed.ffn
        rows = routed.rows * (wide * scenario.bytes_each + FP32 + 8)
        losses = trained * (bool(experts.aux_loss_coeff) + bool(experts.z_loss_coeff))
        choice = experts.num_experts * (1 + FP32 * (1 + losses)) + experts.router_topk * (8 + FP32)
        return rest + rows + self.tokens / scenario.sequence_shards * choice

    def waiting(self) -> float:
        routed = self.routed
        assert routed is not None
        inputs, outputs = routed.hidden + routed.ffn, self.inner * routed.ffn + routed.hidden
        return super().waiting() + routed.rows * (inputs + outputs) * self.scenario.bytes_each
