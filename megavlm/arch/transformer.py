"""Transformer layers: vision, language, and language with a mixture of experts as its MLP.

A router sends each token to `top-k` of E experts, which are spread over EP · ETP neighbouring ranks: EP divides their
number, ETP the width of each. An all-to-all sends a rank's T / TP tokens to the ranks of their experts, another back.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace

from megavlm.arch.kind import (
    Communication,
    Exchange,
    HiddenWeight,
    LayerCost,
    LayerKind,
    Stream,
    hidden_weight,
    stream_bytes,
)
from megavlm.arch.layer_sizes import LanguageLayerSizes, LayerSizes, MixtureSizes
from megavlm.arch.mixers import SOFTMAX, Mixer, attention_rows
from megavlm.arch.scenario import Scenario
from megavlm.arch.tensor_split import HeadSplit, mlp_share, share_of, vision_split
from megavlm.arch.workload import Workload, attends_in_windows
from megavlm.config.derived import is_gated, norms_of_layer
from megavlm.config.schema import ModelConfig, VisionConfig


class TransformerKind(LayerKind):
    """A layer of attention and MLP: the kinds that recomputation, offloading and LoRA apply to."""

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

    @abstractmethod
    def split(self, model: ModelConfig, tp: int) -> HeadSplit:
        """Return how attention heads are sharded over `tp` ranks."""

    def gathered(self, model: ModelConfig) -> float:
        """Return the channels per token that attention gathers, relative to the width of the hidden states."""
        return 1.0

    def communication(self, scenario: Scenario) -> Communication:
        """Return gathers and reductions, which move as many bytes as the all-reduces without sequence parallelism, and
        the exchange of key and value parts among ranks that share a key/value head.
        """
        size, split = stream_bytes(self.reads, scenario), self.split(scenario.model, scenario.dims.tp)
        usual = Communication((size * self.gathered(scenario.model), size), (size, size))
        if split.copies == 1:
            return usual
        parts = split.rows(*split.fused[1:])
        arriving = self.sizes(scenario).tokens * split.received * parts * scenario.bytes_each
        return replace(usual, exchanges=(arriving * split.tp / (split.tp - 1),))


class VisionLayer(TransformerKind):
    """A transformer layer of the vision tower."""

    reads = Stream.PATCHES

    def tower(self, model: ModelConfig) -> VisionConfig:
        """Return the sizes of the encoder that the layer belongs to."""
        return model.vision

    def seen(self, work: Workload) -> Workload:
        """Return the workload with the encoder's positions as patches."""
        return work

    def split(self, model: ModelConfig, tp: int) -> HeadSplit:
        return vision_split(self.tower(model), tp)

    def mlp_width(self, model: ModelConfig) -> int:
        return self.tower(model).ffn_hidden_size

    def parameters_with(self, model: ModelConfig, tp: int, ffn: int) -> int:
        vision = self.tower(model)
        hidden, split = vision.hidden_size, self.split(model, tp)
        heads, width = split.heads, split.width
        gates = 1 + is_gated(vision)
        weights = (attention_rows(split) + (gates + 1) * ffn) * hidden
        biases = split.local_rows * vision.add_qkv_bias + (gates * ffn + 2 * hidden) * vision.add_bias_linear
        norms = (2 + 2 * vision.post_norms) * norm_parameters(vision)
        norms += 2 * width * {"none": 0, "full": heads}.get(vision.qk_norm, 1)
        return weights + biases + norms + 2 * hidden * vision.layer_scale

    def hidden_weights(self, model: ModelConfig) -> Mapping[str, HiddenWeight]:
        vision = self.tower(model)
        hidden, split = vision.hidden_size, self.split(model, 1)
        gates = 1 + is_gated(vision)
        projected = split.per_group * split.width, split.width, split.width
        return {
            "self_attention.linear_qkv.weight": hidden_weight(hidden, *projected, periods=split.groups),
            "self_attention.linear_proj.weight": hidden_weight(hidden, hidden),
            **mlp_weights("mlp", hidden, vision.ffn_hidden_size, gates=gates),
        }

    def cost(self, model: ModelConfig, work: Workload, number: int) -> LayerCost:
        vision, work = self.tower(model), self.seen(work)
        gates = 2 + is_gated(vision)
        rows = attention_rows(self.split(model, 1))
        params = rows * vision.hidden_size + gates * vision.hidden_size * vision.ffn_hidden_size
        windowed = attends_in_windows(vision, number)
        attention = 4.0 * (work.window_squares if windowed else work.patch_squares) * vision.hidden_size
        return LayerCost(params, 2.0 * params * work.patches + attention, attention)

    def padding(self, model: ModelConfig, tp: int) -> tuple[float, float]:
        """Return the relative work with the MLP's padding; padding heads are not counted."""
        vision = self.tower(model)
        gates = 2 + is_gated(vision)
        attention, width = attention_rows(self.split(model, 1)), gates * vision.ffn_hidden_size
        return (attention + tp * gates * self.mlp_share(model, tp)) / (attention + width), 1.0

    def sizes(self, scenario: Scenario) -> LayerSizes:
        return LayerSizes(self.tower(scenario.model), replace(scenario, work=self.seen(scenario.work)))


class LanguageLayer(TransformerKind):
    """A transformer layer of the language model."""

    reads = Stream.TEXT

    def mlp_width(self, model: ModelConfig) -> int:
        return model.language.ffn_hidden_size

    def __init__(self, mixer: Mixer = SOFTMAX) -> None:
        self.mixer = mixer

    def split(self, model: ModelConfig, tp: int) -> HeadSplit:
        return self.mixer.split(self.mixer.seen(model.language), tp)

    def parameters_with(self, model: ModelConfig, tp: int, ffn: int) -> int:
        language = self.mixer.seen(model.language)
        norms = norms_of_layer(language) * language.hidden_size
        attention = self.mixer.weights(language, tp) + self.mixer.others(language, tp)
        return attention + self.mlp_parameters(model, ffn) + norms

    def model_parameters(self, model: ModelConfig) -> int:
        language = self.mixer.seen(model.language)
        padding = self.mixer.weights(language, 1) - self.mixer.model_weights(language)
        return super().model_parameters(model) - padding

    def hidden_weights(self, model: ModelConfig) -> Mapping[str, HiddenWeight]:
        return {**self.mixer.hidden_weights(self.mixer.seen(model.language)), **self.mlp_weights(model)}

    def mlp_weights(self, model: ModelConfig) -> Mapping[str, HiddenWeight]:
        """Return the `hidden_weights` outside attention."""
        return mlp_weights("mlp", model.language.hidden_size, model.language.ffn_hidden_size, gates=2)

    def mlp_parameters(self, model: ModelConfig, ffn: int) -> int:
        """Return the number of parameters of an MLP that is `ffn` wide, without routed experts."""
        return 3 * ffn * model.language.hidden_size

    def padding(self, model: ModelConfig, tp: int) -> tuple[float, float]:
        language, split = self.mixer.seen(model.language), self.split(model, tp)
        row = 3 * language.hidden_size
        whole = self.mixer.model_weights(language) + row * self.mlp_width(model)
        share = self.mixer.multiplied(language, tp) + row * self.mlp_share(model, tp)
        return tp * share / whole, tp * split.local_heads / split.heads

    def cost(self, model: ModelConfig, work: Workload, number: int) -> LayerCost:
        language = self.mixer.seen(model.language)
        params = self.mixer.model_weights(language)
        params += self.mlp_parameters(model, self.mlp_width(model))
        attention = self.mixer.flops(language, work, number)
        return LayerCost(params, 2.0 * params * work.tokens + attention, attention)

    def gathered(self, model: ModelConfig) -> float:
        return self.mixer.gathered(model.language) / model.language.hidden_size

    def sizes(self, scenario: Scenario) -> LayerSizes:
        return LanguageLayerSizes(self.mixer.seen(scenario.model.language), scenario, linear=self.mixer.linear)

    def context_exchange(self, scenario: Scenario) -> tuple[tuple[int, float], ...]:
        """Return the exchange of queries, keys and values, the gather among groups, and the exchange of outputs."""
        sizes, split = self.sizes(scenario), scenario.dims.row_split
        moved = sizes.tokens * scenario.bytes_each
        keys = sizes.groups * sizes.copies * (sizes.width + sizes.value_width)
        gathered = sizes.latents if sizes.latents and split.heads == 1 else keys
        return (
            (split.heads, moved * (sizes.heads * sizes.width + keys)),
            (split.groups, moved * gathered * split.groups),
            (split.heads, moved * sizes.heads * sizes.value_width),
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


def logits_at_once(*, on_gpu: bool) -> int:
    """Return how many logits `--qk-clip` computes in one product: 1 Mi, for a CPU's cache, or 128 MiB on a GPU."""
    return 2**25 if on_gpu else 2**20


class MixtureLayer(LanguageLayer):
    """A language layer with a mixture of experts as its MLP."""

    cpu_calls = 60  # sorting, and three products for each expert: not measured

    def mlp_parameters(self, model: ModelConfig, ffn: int) -> int:
        """Return the number of parameters of the shared expert, and of router, gate and norms, which are replicated."""
        experts = model.experts
        whole = experts.num_experts + experts.shared_gate + 4 * experts.own_norms  # three norms more, and the router's
        rest = whole * model.language.hidden_size + experts.num_experts * (experts.own_norms + experts.add_bias)
        return super().mlp_parameters(model, ffn) + rest

    def mlp_weights(self, model: ModelConfig) -> Mapping[str, HiddenWeight]:
        """Return the matrices of the router, of routed experts and of the shared expert, whose gate is a vector."""
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
        biases = (2 * model.experts.ffn_hidden_size + model.language.hidden_size) * model.experts.add_bias
        return model.experts.num_experts * (_expert_weights(model) + biases) // ranks

    def cost(self, model: ModelConfig, work: Workload, number: int) -> LayerCost:
        rest = super().cost(model, work, number)
        routed = 2.0 * model.experts.router_topk * _expert_weights(model) * work.tokens
        parameters = rest.parameters + self.expert_parameters(model, 1)
        return LayerCost(parameters, rest.forward_flops + routed, rest.attention_flops, routed)

    def sizes(self, scenario: Scenario) -> MixtureSizes:
        return MixtureSizes(self.mixer.seen(scenario.model.language), scenario, linear=self.mixer.linear)

    def communication(self, scenario: Scenario) -> Communication:
        """Return a gather and a reduction each for attention and a shared expert; routed experts are not counted."""
        usual, blocks = super().communication(scenario), 1 + bool(scenario.model.experts.shared_ffn_hidden_size)
        return replace(usual, gathers=usual.gathers[:blocks], reductions=usual.reductions[:blocks])

    def expert_exchange(self, scenario: Scenario) -> tuple[Exchange, ...]:
        """Return the collectives that send tokens to their experts and back.

        All-to-all: each row goes to the rank of its expert, whose ETP ranks then gather one another's rows and sum
        their outputs. All-gather: all tokens go to all ranks, once, and outputs are summed.
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


def _expert_weights(model: ModelConfig) -> int:
    """Return the number of weights of one expert: gate, up and down."""
    return 3 * model.language.hidden_size * model.experts.ffn_hidden_size
