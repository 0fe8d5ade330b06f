"""Sizes of a transformer layer's tensors on one rank, the bytes saved for its backward pass, and spans of masks.

Masked attention runs in spans: some consecutive queries with the keys that they may attend to. A kernel with a mask
computes all scores in the mask's rectangle. With spans, the scores of a causal mask are little more than half of a
square, and those of a sliding window grow linearly with the length.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import gcd

from megavlm.arch.image_tokens import tokens_per_grid
from megavlm.arch.kind import FP32, norm_bytes
from megavlm.arch.scenario import Scenario
from megavlm.arch.tensor_split import DeltaSplit, delta_split, language_split, mlp_share, share_of, vision_split
from megavlm.config.derived import (
    attends_both_ways,
    is_gated,
    is_latent,
    masks_all_layers,
    masks_attention,
    needs_eager_attention,
    norms_of_layer,
)
from megavlm.config.schema import LanguageConfig, VisionConfig

QUERIES = 512  # per span


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
    shares_keys = False  # whether values are keys before their norm
    read = 2  # different tensors that attention and MLP read
    latents = 0  # channels of a token from which keys and values of all heads are projected, the rotated ones included

    def __init__(self, vision: VisionConfig, scenario: Scenario) -> None:
        self.scenario, self.tokens, self.hidden = scenario, scenario.work.patches, vision.hidden_size
        split = vision_split(vision, scenario.dims.tp)
        self.heads, self.groups, self.width = split.local_heads, split.slots, split.width
        self.value_width = self.width
        self.ffn = mlp_share(vision.ffn_hidden_size, scenario.dims.tp)
        self.discards = split.discards  # whether attention's output for padding query heads is discarded
        self.norm: str = vision.normalization
        self.activation: str = vision.activation
        self.qkv_bias, self.linear_bias = vision.add_qkv_bias, vision.add_bias_linear
        self.rotated = vision.position_embedding != "learned"
        self.qk_norm = vision.qk_norm != "none"
        self.value_norm = vision.qk_norm == "head_and_values"
        self.scaled, self.norms = vision.layer_scale, 2 + 2 * vision.post_norms
        self.keys_kept, self.copies = self.groups, 1  # key heads that attention saves
        self.inner = 1 + is_gated(vision)  # inputs of the activation, in widths of the MLP

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
        normed = T * (self.heads + self.groups * (1 + self.value_norm)) * self.width
        both = self.width + self.value_width
        attention = (T * (self.heads + self.keys_kept) * both) * e  # q, k, v and the output
        attention += T * self.heads * FP32 * (not core_attention)  # log of the sums that softmax divides by
        if scenario.dims.cp > 1 and not core_attention:  # tensors after the exchange: repeated keys, and another output
            keys = self.keys_kept * (self.copies * scenario.dims.cp_groups - 1)
            attention += T * (keys * both + self.heads * trained * self.value_width) * e
        if self.discards and not core_attention:  # the output before padding heads are discarded
            attention += T * self.heads * trained * self.width * e
        if self.qk_norm:  # inputs of the norms, beside those of attention
            attention += (normed - T * self.groups * self.width * self.shares_keys) * e
        if self.gated:  # of each query channel the gate, its sigmoid in fp32, and what it multiplies in fp32
            attention += T * self.heads * self.width * (e + 2 * FP32)
        if self.qk_norm and not scenario.on_gpu:
            attention += normed * FP32 * (1 if e == FP32 else 2)
        return attention

    def waiting(self) -> float:
        """Return the bytes that delayed weight gradients need: inputs of four linear layers and gradients of their
        outputs. Sequence parallelism shards the inputs of the first and the third, but not with Transformer Engine.
        """
        T, t = self.tokens, self.tokens / (1 if self.scenario.te else self.scenario.sequence_shards)
        inputs = self.read * t * self.hidden + T * (self.heads * self.width + self.ffn)
        projected = self.heads + (2 - self.shares_keys) * self.groups
        outputs = T * (projected * self.width + self.inner * self.ffn + 2 * self.hidden)
        return (inputs + outputs) * self.scenario.bytes_each


class LanguageLayerSizes(LayerSizes):
    """Sizes of a language layer's tensors on one rank, in elements."""

    delta: DeltaSplit | None = None  # of linear attention
    ranks: tuple[int | None, int] = (None, 0)  # widths of the latents of queries, and of keys and values

    def __init__(self, language: LanguageConfig, scenario: Scenario, *, linear: bool) -> None:
        tp = scenario.dims.tp
        self.delta = delta_split(language, tp) if linear else None
        split = language_split(language, tp) if self.delta is None else self.delta.heads
        self.scenario, self.tokens, self.hidden = scenario, scenario.work.tokens, language.hidden_size
        self.heads, self.groups, self.width = split.local_heads, split.slots, split.width
        self.value_width = self.width
        if is_latent(language):
            self.value_width, self.ranks = language.v_head_dim, (language.q_lora_rank, language.kv_lora_rank or 0)
            self.latents = self.ranks[1] + language.qk_pos_emb_head_dim
        self.discards, self.gated = split.discards, split.gated
        self.ffn, self.inner = mlp_share(language.ffn_hidden_size, tp), 2
        self.norm, self.activation = language.normalization, language.activation
        self.qkv_bias, self.linear_bias = language.add_qkv_bias, False
        self.rotated, self.qk_norm, self.scaled = not linear, language.qk_norm and not linear, False
        self.value_norm, self.shares_keys = language.value_norm and not linear, language.keys_as_values
        self.norms, self.read = norms_of_layer(language), 2 - language.parallel_block
        exchanging = scenario.dims.row_split.heads
        self.copies = exchanging // gcd(self.groups, exchanging)
        self.keys_kept = self.heads if masks_attention(language) else self.groups  # with masks, one for each query head

    def attention_saved(self, *, trained: bool, core_attention: bool) -> float:
        """Return the bytes that attention saves between its projections.

        Linear attention saves the inputs of the convolution and of the rule, and the tensors around its norm. Latent
        attention adds the inputs of the norms of latents, and of the projections that read latents.
        """
        if self.delta is None:
            usual = super().attention_saved(trained=trained, core_attention=core_attention)
            return usual + self._latents_saved(trained=trained)
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

    def _latents_saved(self, *, trained: bool) -> float:
        if not self.latents:
            return 0.0
        scenario, t = self.scenario, self.tokens / self.scenario.sequence_shards
        norms = sum(norm_bytes(scenario, t, width or 0, "RMSNorm") for width in self.ranks if width)
        gathers = scenario.dims.cp > 1 and scenario.dims.row_split.heads == 1
        keys = self.tokens * scenario.dims.cp if gathers else t
        read = t * (self.ranks[0] or 0) + keys * self.ranks[1]
        return norms + read * trained * scenario.bytes_each

    def waiting(self) -> float:
        """Return the bytes of delayed weight gradients; latent attention delays its up-projections alone."""
        if not self.latents:
            return super().waiting()
        T, t = self.tokens, self.tokens / (1 if self.scenario.te else self.scenario.sequence_shards)
        queries, keys = self.ranks
        turning = self.latents - keys
        inputs = t * (self.hidden + (queries or self.hidden) + keys) + T * (self.heads * self.value_width + self.ffn)
        heads = self.heads * (2 * self.width - turning + self.value_width)
        return (inputs + T * (heads + self.inner * self.ffn + 2 * self.hidden)) * self.scenario.bytes_each


class MixtureSizes(LanguageLayerSizes):
    """Sizes of the tensors of a language layer with routed experts, and maybe a shared expert, on one rank."""

    def __init__(self, language: LanguageConfig, scenario: Scenario, *, linear: bool) -> None:
        model, dims = scenario.model, scenario.dims
        super().__init__(language, scenario, linear=linear)
        experts = model.experts
        self.ffn = share_of(experts.shared_ffn_hidden_size or 0, dims.tp)
        self.norms += 4 * experts.own_norms  # three of layers, and the router's
        moved = self.tokens / scenario.sequence_shards * experts.router_topk * scenario.busiest
        self.routed = RoutedRows(
            rows=moved * dims.expert_tp,
            experts=experts.num_experts // dims.ep,
            hidden=self.hidden,
            ffn=experts.ffn_hidden_size / dims.expert_tp,
            moved=moved,
        )

    def saved(self, *, trained: bool, core_attention: bool) -> float:
        """Return the bytes with the shared expert as the MLP, plus those of routed experts: for each row the input of
        the activation, output, weight and index; for each token the router's choice and scores. `rows_read` is apart.
        """
        rest, routed = super().saved(trained=trained, core_attention=core_attention), self.routed
        assert routed is not None
        scenario, experts = self.scenario, self.scenario.model.experts
        wide = (self.inner + 1) * routed.ffn
        wide += routed.hidden / scenario.dims.expert_tp * experts.add_bias  # the second bias, which weights multiply
        rows = routed.rows * (wide * scenario.bytes_each + FP32 + 8)
        losses = trained * (bool(experts.aux_loss_coeff) + bool(experts.z_loss_coeff))
        choice = experts.num_experts * (1 + FP32 * (1 + losses)) + experts.router_topk * (8 + FP32)
        return rest + rows + self.tokens / scenario.sequence_shards * choice

    def rows_read(self) -> float:
        """Return the bytes of the inputs of both products of routed experts."""
        routed = self.routed
        assert routed is not None
        return routed.rows * (routed.hidden + routed.ffn) * self.scenario.bytes_each

    def waiting(self) -> float:
        routed = self.routed
        assert routed is not None
        inputs, outputs = routed.hidden + routed.ffn, self.inner * routed.ffn + routed.hidden
        return super().waiting() + routed.rows * (inputs + outputs) * self.scenario.bytes_each


@dataclass(frozen=True)
class Span:
    """Consecutive queries and their keys, as indices among the tokens of all sequences."""

    queries: range
    keys: range

    @property
    def scores(self) -> int:
        """Return the number of scores that attention computes."""
        return len(self.queries) * len(self.keys)


def spans_of(bounds: Sequence[int], *, window: int | None, longest: int, step: int = QUERIES) -> Iterator[Span]:
    """Yield the spans of the sequences between `bounds` (0, …, T), in the order of their queries.

    Args:
        window: how many tokens a token attends to at most, itself and those before it; None: all before it.
        longest: tokens of the longest run of bidirectional attention (an image or prefix); 0 without one.
        step: queries of a span.
    """
    for first in range(0, bounds[-1], step):
        last = min(first + step, bounds[-1])  # the queries are [first, last)
        begin = bounds[bisect_right(bounds, first) - 1]
        end = bounds[bisect_right(bounds, last - 1)]
        if window is not None:
            begin = max(begin, first - window + 1)
        yield Span(range(first, last), range(begin, min(end, last + max(longest - 1, 0))))


def mask_bytes(scenario: Scenario) -> float:
    """Return the bytes of the attention masks of a micro-batch, which all layers of a chunk share; 0 without masks."""
    return float(sum(span.scores for span in _typical_spans(scenario)) * scenario.bytes_each)


def score_bytes(scenario: Scenario, heads: int) -> float:
    """Return the bytes of attention scores that a backward pass holds at a time with softcap or sinks; 0 without.

    These are softmax, its gradient, their product, and tanh if there is a softcap, of the largest span, in fp32.
    """
    if not needs_eager_attention(scenario.model.language):
        return 0.0
    largest = max(span.scores for span in _typical_spans(scenario))
    tensors = 3.0 + (scenario.model.language.attention_softcap is not None)
    return tensors * largest * heads // scenario.dims.row_split.heads * FP32


def _typical_spans(scenario: Scenario) -> Iterator[Span]:
    language, vision, work = scenario.model.language, scenario.model.vision, scenario.work
    side = vision.image_size // vision.patch_size
    longest = tokens_per_grid((side, side), scenario.model.projector) if attends_both_ways(language) else 0
    windows = {language.window_size} - {None}
    if masks_all_layers(language) and (language.window_size is None or language.full_attention_layers):
        windows.add(None)
    length = max(1, work.token_squares // max(1, work.tokens))  # tokens of a sample
    if language.bidirectional_prefix:
        longest = length
    tokens = work.tokens * scenario.dims.cp  # masks are of whole rows
    bounds = [*range(0, tokens, length), tokens]
    for window in windows:
        reach = max(window, longest) if language.bidirectional_prefix and window is not None else window
        yield from spans_of(bounds, window=reach, longest=longest)
