"""Transformer layers: vision, language, and language with a mixture of experts as its MLP.

A router sends each token to `top-k` of E experts, which are spread over EP · ETP neighbouring ranks: EP divides their
number, ETP the width of each. An all-to-all sends a rank's T / TP tokens to the ranks of their experts, another back.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import gcd

from megavlm.arch.kind import (
    FP32,
    Communication,
    Exchange,
    HiddenWeight,
    LayerCost,
    LayerKind,
    Stream,
    hidden_weight,
    norm_bytes,
    stream_bytes,
)
from megavlm.arch.scenario import Scenario
from megavlm.arch.tensor_split import language_split, mlp_share, share_of
from megavlm.arch.workload import Workload, attends_in_windows
from megavlm.config.derived import attends_in_window, masks_attention
from megavlm.config.schema import LanguageConfig, ModelConfig, VisionConfig


class TransformerKind(LayerKind):
    """A layer of attention and MLP, the layers that recomputation, offloading and LoRA apply to."""

    cpu_calls = 20

    def is_recomputed(self, model: ModelConfig) -> bool:
        return True

    @abstractmethod
    def mlp_width(self, model: ModelConfig) -> int:
        """Return the width of the MLP that processes all tokens."""

    def mlp_share(self, model: ModelConfig, tp: int) -> int:
        """Return the width of the MLP that processes all tokens on one of `tp` ranks, padding included."""
        return mlp_share(self.mlp_width(model), tp)

    @abstractmethod
    def parameters_with(self, model: ModelConfig, tp: int, ffn: int) -> int:
        """Return the number of parameters on one of `tp` ranks if its MLP is `ffn` wide."""

    def parameters(self, model: ModelConfig, tp: int) -> int:
        return self.parameters_with(model, tp, self.mlp_share(model, tp))

    def model_parameters(self, model: ModelConfig) -> int:
        return self.parameters_with(model, 1, self.mlp_width(model))

    @abstractmethod
    def sizes(self, scenario: Scenario) -> LayerSizes:
        """Return the sizes of the layer's tensors on one tensor-parallel rank."""

    def saved_bytes(self, scenario: Scenario, *, trained: bool, core_attention: bool) -> float:
        return self.sizes(scenario).saved(trained=trained, core_attention=core_attention)

    def waiting_bytes(self, scenario: Scenario) -> float:
        return self.sizes(scenario).waiting()

    def communication(self, scenario: Scenario) -> Communication:
        """Return gathers and reductions, as many bytes as the all-reduces without sequence parallelism."""
        size = stream_bytes(self.reads, scenario)
        return Communication((size, size), (size, size))


class VisionLayer(TransformerKind):
    """A transformer layer of the vision tower."""

    reads = Stream.PATCHES

    def mlp_width(self, model: ModelConfig) -> int:
        return model.vision.ffn_hidden_size

    def parameters_with(self, model: ModelConfig, tp: int, ffn: int) -> int:
        vision = model.vision
        hidden, heads = vision.hidden_size, vision.num_attention_heads
        width = hidden // heads
        local = share_of(heads, tp) * width
        gates = 2 if vision.activation == "swiglu" else 1
        weights = (4 * local + (gates + 1) * ffn) * hidden
        biases = 3 * local * vision.add_qkv_bias + (gates * ffn + 2 * hidden) * vision.add_bias_linear
        norms = {"none": 0, "head": 2 * width, "full": 2 * heads * width}[vision.qk_norm] + 2 * norm_parameters(vision)
        return weights + biases + norms + 2 * hidden * vision.layer_scale

    def hidden_weights(self, model: ModelConfig) -> Mapping[str, HiddenWeight]:
        vision = model.vision
        hidden, heads = vision.hidden_size, vision.num_attention_heads
        gates = 2 if vision.activation == "swiglu" else 1
        return {
            "self_attention.linear_qkv.weight": hidden_weight(hidden, *(hidden // heads,) * 3, periods=heads),
            "self_attention.linear_proj.weight": hidden_weight(hidden, hidden),
            **mlp_weights("mlp", hidden, vision.ffn_hidden_size, gates=gates),
        }

    def cost(self, model: ModelConfig, work: Workload, number: int) -> LayerCost:
        vision = model.vision
        gates = 3 if vision.activation == "swiglu" else 2
        params = 4 * vision.hidden_size**2 + gates * vision.hidden_size * vision.ffn_hidden_size
        windowed = attends_in_windows(vision, number)
        attention = 4.0 * (work.window_squares if windowed else work.patch_squares) * vision.hidden_size
        return LayerCost(params, 2.0 * params * work.patches + attention, attention)

    def padding(self, model: ModelConfig, tp: int) -> tuple[float, float]:
        """Return what the padding of the MLP adds; that of heads is not counted."""
        vision = model.vision
        gates = 3 if vision.activation == "swiglu" else 2
        attention, width = 4 * vision.hidden_size, gates * vision.ffn_hidden_size
        return (attention + tp * gates * self.mlp_share(model, tp)) / (attention + width), 1.0

    def sizes(self, scenario: Scenario) -> LayerSizes:
        return LayerSizes(scenario.model.vision, scenario)


class LanguageLayer(TransformerKind):
    """A transformer layer of the language model."""

    reads = Stream.TEXT

    def mlp_width(self, model: ModelConfig) -> int:
        return model.language.ffn_hidden_size

    def parameters_with(self, model: ModelConfig, tp: int, ffn: int) -> int:
        language = model.language
        split, hidden = language_split(language, tp), language.hidden_size
        weights = _attention_rows(language, tp) * hidden + self.mlp_parameters(model, ffn)
        norms = 2 * split.width * language.qk_norm + (4 if language.post_norms else 2) * hidden
        return weights + split.local_rows * language.add_qkv_bias + norms

    def hidden_weights(self, model: ModelConfig) -> Mapping[str, HiddenWeight]:
        language = model.language
        hidden, width, groups = language.hidden_size, language.kv_channels, language.num_query_groups
        queries = language.num_attention_heads // groups * width
        return {
            "self_attention.linear_qkv.weight": hidden_weight(hidden, queries, width, width, periods=groups),
            "self_attention.linear_proj.weight": hidden_weight(groups * queries, hidden),
            **self.mlp_weights(model),
        }

    def mlp_weights(self, model: ModelConfig) -> Mapping[str, HiddenWeight]:
        """Return the `hidden_weights` outside attention."""
        return mlp_weights("mlp", model.language.hidden_size, model.language.ffn_hidden_size, gates=2)

    def mlp_parameters(self, model: ModelConfig, ffn: int) -> int:
        """Return the number of parameters of an MLP that is `ffn` wide, without routed experts."""
        return 3 * ffn * model.language.hidden_size

    def padding(self, model: ModelConfig, tp: int) -> tuple[float, float]:
        language = model.language
        split = language_split(language, tp)
        whole = _attention_rows(language, 1) + 3 * self.mlp_width(model)
        share = _attention_rows(language, tp) + 3 * self.mlp_share(model, tp)
        return tp * share / whole, tp * split.local_heads / split.heads

    def communication(self, scenario: Scenario) -> Communication:
        """Return also the exchange of key and value parts among ranks that share a key/value head."""
        split, usual = language_split(scenario.model.language, scenario.dims.tp), super().communication(scenario)
        if split.copies == 1:
            return usual
        arriving = scenario.work.tokens * split.received * 2 * split.part_width * scenario.bytes_each
        return replace(usual, exchanges=(arriving * split.tp / (split.tp - 1),))

    def cost(self, model: ModelConfig, work: Workload, number: int) -> LayerCost:
        language = model.language
        heads = 2 * language.num_attention_heads + 2 * language.num_query_groups
        params = language.hidden_size * heads * language.kv_channels
        params += self.mlp_parameters(model, self.mlp_width(model))
        squares = work.sliding_squares if attends_in_window(language, number) else work.token_squares
        attention = 2.0 * squares * language.kv_channels * language.num_attention_heads
        return LayerCost(params, 2.0 * params * work.tokens + attention, attention)

    def sizes(self, scenario: Scenario) -> LayerSizes:
        return LanguageLayerSizes(scenario.model.language, scenario)

    def context_exchange(self, scenario: Scenario) -> tuple[tuple[int, float], ...]:
        """Return the exchanges of queries, keys and values, of keys and values among groups, and of outputs."""
        sizes, split = self.sizes(scenario), scenario.dims.row_split
        one_head = sizes.tokens * sizes.width * scenario.bytes_each
        keys = 2 * sizes.groups * sizes.copies
        return (
            (split.heads, one_head * (sizes.heads + keys)),
            (split.groups, one_head * keys * split.groups),
            (split.heads, one_head * sizes.heads),
        )


def mlp_weights(prefix: str, hidden: int, ffn: int, *, gates: int, experts: int = 0) -> dict[str, HiddenWeight]:
    """Return the weights of an MLP, or of `experts` MLPs; `gates` is 2 if gate and up are one weight, else 1."""
    return {
        f"{prefix}.linear_fc1.weight": hidden_weight(hidden, *(ffn,) * gates, experts=experts),
        f"{prefix}.linear_fc2.weight": hidden_weight(ffn, hidden, experts=experts),
    }


def norm_parameters(vision: VisionConfig) -> int:
    """Return the number of parameters of a norm of the vision tower."""
    return vision.hidden_size * (2 if vision.normalization == "LayerNorm" else 1)


def _attention_rows(language: LanguageConfig, tp: int) -> int:
    """Return the number of rows, each as wide as the hidden states, of attention's weights on one of `tp` ranks."""
    split = language_split(language, tp)
    return split.local_rows + split.local_heads * split.width


def logits_at_once(*, on_gpu: bool) -> int:
    """Return how many logits `--qk-clip` computes in one product: 1 Mi, for a CPU's cache, or 128 MiB on a GPU."""
    return 2**25 if on_gpu else 2**20


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

    def __init__(self, vision: VisionConfig, scenario: Scenario) -> None:
        self.scenario, self.tokens, self.hidden = scenario, scenario.work.patches, vision.hidden_size
        width = vision.hidden_size // vision.num_attention_heads
        self.heads = self.groups = share_of(vision.num_attention_heads, scenario.dims.tp)
        self.width, self.ffn = width, mlp_share(vision.ffn_hidden_size, scenario.dims.tp)
        self.discards = False  # whether attention's output for padding query heads is discarded
        self.norm: str = vision.normalization
        self.activation: str = vision.activation
        self.qkv_bias, self.linear_bias = vision.add_qkv_bias, vision.add_bias_linear
        self.rotated = vision.position_embedding != "learned"
        self.qk_norm = vision.qk_norm != "none"
        self.scaled, self.post_norms = vision.layer_scale, False
        self.keys_kept, self.copies = self.groups, 1  # key heads that attention saves
        self.inner = 1 + (vision.activation == "swiglu")  # inputs of the activation, in widths of the MLP

    def saved(self, *, trained: bool, core_attention: bool) -> float:
        """Return the bytes that the layer saves for its backward pass."""
        scenario, e, T = self.scenario, self.scenario.bytes_each, self.tokens
        t = T / scenario.sequence_shards
        norms = (4 if self.post_norms else 2) * norm_bytes(scenario, t, self.hidden, self.norm)
        linear_inputs = (2 * t * self.hidden + T * self.ffn) * e * trained
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
        if self.qk_norm and not scenario.on_gpu:
            attention += queries_and_keys * FP32 * (1 if e == FP32 else 2)
        return norms + linear_inputs + attention + T * self.inner * self.ffn * e + 2 * t * self.hidden * e * self.scaled

    def waiting(self) -> float:
        """Return the bytes that delayed weight gradients need: inputs of four linear layers and gradients of their
        outputs. Sequence parallelism shards the inputs of the first and the third, but not with Transformer Engine.
        """
        T, t = self.tokens, self.tokens / (1 if self.scenario.te else self.scenario.sequence_shards)
        inputs = 2 * t * self.hidden + T * (self.heads * self.width + self.ffn)
        outputs = T * ((self.heads + 2 * self.groups) * self.width + self.inner * self.ffn + 2 * self.hidden)
        return (inputs + outputs) * self.scenario.bytes_each


class LanguageLayerSizes(LayerSizes):
    """Sizes of a language layer's tensors on one rank, in elements."""

    def __init__(self, language: LanguageConfig, scenario: Scenario) -> None:
        tp = scenario.dims.tp
        split = language_split(language, tp)
        self.scenario, self.tokens, self.hidden = scenario, scenario.work.tokens, language.hidden_size
        self.heads, self.groups, self.width = split.local_heads, split.slots, split.width
        self.discards = split.discards
        self.ffn, self.inner = mlp_share(language.ffn_hidden_size, tp), 2
        self.norm, self.activation = "RMSNorm", language.activation
        self.qkv_bias, self.linear_bias = language.add_qkv_bias, False
        self.rotated, self.qk_norm, self.scaled = True, language.qk_norm, False
        self.post_norms = language.post_norms
        exchanging = scenario.dims.row_split.heads
        self.copies = exchanging // gcd(self.groups, exchanging)
        self.keys_kept = self.heads if masks_attention(language) else self.groups  # masks repeat them for their queries


class MixtureLayer(LanguageLayer):
    """A language layer with a mixture of experts as its MLP."""

    cpu_calls = 60  # sorting, and three products for each expert: not measured

    def mlp_parameters(self, model: ModelConfig, ffn: int) -> int:
        """Return the number of parameters of the shared expert, and of router and gate, which are replicated."""
        whole = model.experts.num_experts + model.experts.shared_gate
        return super().mlp_parameters(model, ffn) + whole * model.language.hidden_size

    def mlp_weights(self, model: ModelConfig) -> Mapping[str, HiddenWeight]:
        """Return the matrices of the router, of each expert and of the shared expert; its gate is a vector."""
        experts, hidden = model.experts, model.language.hidden_size
        count, shared = experts.num_experts, experts.shared_ffn_hidden_size
        return {
            "mlp.router.weight": hidden_weight(hidden, count),
            **mlp_weights("mlp.experts.experts", hidden, experts.ffn_hidden_size, gates=2, experts=count),
            **(mlp_weights("mlp.shared_experts", hidden, shared, gates=2) if shared else {}),
        }

    def mlp_width(self, model: ModelConfig) -> int:
        return model.experts.shared_ffn_hidden_size or 0

    def mlp_share(self, model: ModelConfig, tp: int) -> int:
        """Return the width of the shared expert on one of `tp` ranks; it is not padded."""
        return share_of(self.mlp_width(model), tp)

    def expert_parameters(self, model: ModelConfig, ranks: int) -> int:
        return model.experts.num_experts * _expert_weights(model) // ranks

    def cost(self, model: ModelConfig, work: Workload, number: int) -> LayerCost:
        rest = super().cost(model, work, number)
        routed = 2.0 * model.experts.router_topk * _expert_weights(model) * work.tokens
        parameters = rest.parameters + self.expert_parameters(model, 1)
        return LayerCost(parameters, rest.forward_flops + routed, rest.attention_flops, routed)

    def sizes(self, scenario: Scenario) -> LayerSizes:
        return _MixtureSizes(scenario)

    def communication(self, scenario: Scenario) -> Communication:
        """Return a gather and a reduction around attention and a shared expert, without those of routed experts."""
        usual, blocks = super().communication(scenario), 1 + bool(scenario.model.experts.shared_ffn_hidden_size)
        return replace(usual, gathers=usual.gathers[:blocks], reductions=usual.reductions[:blocks])

    def expert_exchange(self, scenario: Scenario) -> tuple[Exchange, ...]:
        """Return the collectives that send tokens to their experts and back.

        All-to-all: each row goes to the rank of its expert, whose ETP ranks then gather one another's rows and sum
        their outputs. Gathered: all tokens go to all ranks, once, and outputs are summed.
        """
        sizes, dims = self.sizes(scenario), scenario.dims
        assert sizes.routed is not None
        row, ranks = sizes.hidden * scenario.bytes_each, dims.ep * dims.expert_tp
        if scenario.gathers_tokens:
            tokens = sizes.tokens / scenario.sequence_shards
            return (Exchange(ranks, 1, ranks * tokens * row, to_each=False),) * (2 if ranks > 1 else 0)
        sent = Exchange(dims.ep, dims.expert_tp, sizes.routed.moved * row, to_each=True)
        gathered = Exchange(dims.expert_tp, 1, sizes.routed.rows * row, to_each=False)
        return tuple(exchange for exchange in (sent, gathered, gathered, sent) if exchange.ranks > 1)


class _MixtureSizes(LanguageLayerSizes):
    """Sizes of a layer whose MLP is a shared expert beside routed experts."""

    def __init__(self, scenario: Scenario) -> None:
        model, dims = scenario.model, scenario.dims
        super().__init__(model.language, scenario)
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


def _expert_weights(model: ModelConfig) -> int:
    """Return the number of weights of one expert: gate, up and down."""
    return 3 * model.language.hidden_size * model.experts.ffn_hidden_size
