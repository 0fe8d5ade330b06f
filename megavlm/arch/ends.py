"""Layer kinds other than transformer layers: patch embedding, norms, connectors, token embedding and output."""

from __future__ import annotations

from collections.abc import Mapping

from megavlm.arch.connector import Connector, connector_of
from megavlm.arch.connectors.mlp import Mlp
from megavlm.arch.kind import (
    FP32,
    Communication,
    HiddenWeight,
    LayerCost,
    LayerKind,
    Stream,
    hidden_weight,
    norm_bytes,
    stream_bytes,
)
from megavlm.arch.layer_sizes import LayerSizes
from megavlm.arch.layers import OUTPUT
from megavlm.arch.objectives import learned_scalars, objective_of
from megavlm.arch.scenario import Scenario
from megavlm.arch.tensor_split import merger_width, mlp_share
from megavlm.arch.transformer import VisionLayer, norm_parameters
from megavlm.arch.workload import Workload
from megavlm.config.derived import is_gated, learned_positions, tower_merge
from megavlm.config.schema import ModelConfig

_VISION_LAYER = VisionLayer()
LOSS_WORK = 2**25  # bytes of fp32 logits that `model/cross_entropy.py` makes at a time: about a GPU's second cache


class PatchEmbed(LayerKind):
    """Patch embedding of the vision tower, with its learned positions and first norm."""

    reads = Stream.PATCHES
    launches = (21, 23)
    cpu_calls = 4

    def parameters(self, model: ModelConfig, tp: int) -> int:
        vision = model.vision
        pixels = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        rows = pixels + vision.patch_bias + vision.class_token
        rows += learned_positions(vision)
        return rows * vision.hidden_size + norm_parameters(vision) * vision.pre_norm + 2 * pixels * vision.encoder_free

    def cost(self, model: ModelConfig, work: Workload, number: int) -> LayerCost:
        vision = model.vision
        pixels = vision.in_channels * vision.patch_size**2
        params = (vision.temporal_patch_size * pixels + learned_positions(vision)) * vision.hidden_size
        return LayerCost(params, 2.0 * pixels * vision.hidden_size * work.patches)

    def saved_bytes(self, scenario: Scenario, *, trained: bool, core_attention: bool) -> float:
        vision, patches = scenario.model.vision, scenario.work.patches
        norm = norm_bytes(scenario, patches, vision.hidden_size, vision.normalization) * vision.pre_norm
        return patches * vision.in_channels * vision.patch_size**2 * scenario.bytes_each + norm


class VisionMerger(LayerKind):
    """Merger inside the vision tower (MiniCPM-V 4.6): attention within each block of 2×2 patches, then an MLP of the
    block's patches together, four times as wide as that of a vision layer, which is added to their mean.
    """

    reads = Stream.PATCHES
    launches = (24, 44)  # about those of a vision layer: not measured
    cpu_calls = 20

    def is_present(self, model: ModelConfig) -> bool:
        return model.vision.merger_layer is not None

    def is_recomputed(self, model: ModelConfig) -> bool:
        return True

    def parameters(self, model: ModelConfig, tp: int) -> int:
        return self._count(model, tp, mlp_share(merger_width(model.vision), tp))

    def model_parameters(self, model: ModelConfig) -> int:
        return self._count(model, 1, merger_width(model.vision))

    def _count(self, model: ModelConfig, tp: int, ffn: int) -> int:
        """Return a vision layer's number of parameters if its MLP is `ffn` wide, and MLP and norm read whole blocks."""
        vision, more = model.vision, tower_merge(model.vision) ** 2 - 1
        gates = 1 + is_gated(vision)
        wider = more * (gates * ffn * vision.hidden_size + norm_parameters(vision))
        return _VISION_LAYER.parameters_with(model, tp, ffn) + wider

    def hidden_weights(self, model: ModelConfig) -> Mapping[str, HiddenWeight]:
        vision, width = model.vision, merger_width(model.vision)
        gates = 1 + is_gated(vision)
        inputs = vision.hidden_size * tower_merge(vision) ** 2
        return {
            **_VISION_LAYER.hidden_weights(model),
            "mlp.linear_fc1.weight": hidden_weight(inputs, *(width,) * gates),
            "mlp.linear_fc2.weight": hidden_weight(width, vision.hidden_size),
        }

    def cost(self, model: ModelConfig, work: Workload, number: int) -> LayerCost:
        vision, block = model.vision, tower_merge(model.vision) ** 2
        gates = 1 + is_gated(vision)
        projections = 4 * vision.hidden_size**2
        mlp = (gates * block + 1) * vision.hidden_size * merger_width(vision)
        attention = 4.0 * work.window_squares * vision.hidden_size
        flops = 2.0 * (projections + mlp / block) * work.patches + attention
        return LayerCost(projections + mlp, flops, attention)

    def saved_bytes(self, scenario: Scenario, *, trained: bool, core_attention: bool) -> float:
        """Return the bytes that a vision layer saves: the MLP has a quarter of the tokens, each four times as wide."""
        return LayerSizes(scenario.model.vision, scenario).saved(trained=trained, core_attention=core_attention)

    def communication(self, scenario: Scenario) -> Communication:
        size = stream_bytes(self.reads, scenario)
        return Communication((size, size), (size, size / tower_merge(scenario.model.vision) ** 2))


class VisionNorm(LayerKind):
    """Last norm of the vision tower, which some models lack."""

    reads = Stream.PATCHES

    def is_present(self, model: ModelConfig) -> bool:
        return model.vision.post_norm and model.vision.feature_layer == -1

    def parameters(self, model: ModelConfig, tp: int) -> int:
        return norm_parameters(model.vision) if self.is_present(model) else 0

    def cost(self, model: ModelConfig, work: Workload, number: int) -> LayerCost:
        return LayerCost(model.vision.hidden_size, 0.0)

    def saved_bytes(self, scenario: Scenario, *, trained: bool, core_attention: bool) -> float:
        vision, tokens = scenario.model.vision, scenario.work.patches / scenario.sequence_shards
        present = self.is_present(scenario.model)
        return norm_bytes(scenario, tokens, vision.hidden_size, vision.normalization) if present else 0.0


class Projector(LayerKind):
    """Layer kind of the projector, which delegates to the connector that `--projector-kind` names."""

    reads = Stream.PATCHES

    def connector(self, model: ModelConfig) -> Connector:
        """Return the connector that the layer delegates to."""
        return connector_of(model.projector)

    def kernels(self, model: ModelConfig) -> tuple[float, float]:
        return self.connector(model).kernels(model)

    def calls(self, model: ModelConfig) -> float:
        return 0.4 * self.kernels(model)[0]  # an estimate

    def is_recomputed(self, model: ModelConfig) -> bool:
        return self.connector(model).recomputes

    def parameters(self, model: ModelConfig, tp: int) -> int:
        return self.connector(model).parameters(model, tp)

    def hidden_weights(self, model: ModelConfig) -> Mapping[str, HiddenWeight]:
        return self.connector(model).hidden_weights(model)

    def cost(self, model: ModelConfig, work: Workload, number: int) -> LayerCost:
        return self.connector(model).cost(model, work)

    def products(self, scenario: Scenario, *, trained: bool, reached: bool) -> tuple[int, int]:
        return self.connector(scenario.model).products(trained=trained, reached=reached)

    def saved_bytes(self, scenario: Scenario, *, trained: bool, core_attention: bool) -> float:
        return self.connector(scenario.model).saved_bytes(scenario, trained=trained)

    def communication(self, scenario: Scenario) -> Communication:
        return self.connector(scenario.model).communication(scenario)


class DeepstackMerger(Projector):
    """A DeepStack merger (Qwen3-VL): a projector with a norm, on the output of an inner vision layer."""

    normed = Mlp("deepstack", normed=True)  # of `model.projector.kind`

    def connector(self, model: ModelConfig) -> Connector:
        return self.normed


class Embedding(LayerKind):
    """Token embedding, with image features merged in."""

    reads = Stream.FEATURES
    launches = (2, 5)
    cpu_calls = 2

    def parameters(self, model: ModelConfig, tp: int) -> int:
        return vocabulary_shard(model, tp)

    def cost(self, model: ModelConfig, work: Workload, number: int) -> LayerCost:
        return LayerCost(vocabulary(model) * model.language.hidden_size, 0.0)

    def saved_bytes(self, scenario: Scenario, *, trained: bool, core_attention: bool) -> float:
        work, language = scenario.work, scenario.model.language
        normed = work.tokens / scenario.sequence_shards * language.embedding_norm
        norm = norm_bytes(scenario, normed, language.hidden_size, "RMSNorm")
        return stream_bytes(Stream.FEATURES, scenario) + (work.tokens + work.features + work.sounds) * 8 + norm

    def communication(self, scenario: Scenario) -> Communication:
        text = stream_bytes(Stream.TEXT, scenario)
        return Communication(reductions=(text, text))  # the two halves of an all-reduce of whole embeddings


class LanguageNorm(LayerKind):
    """Last norm of the language model."""

    reads = Stream.TEXT
    launches = (1, 2)

    def parameters(self, model: ModelConfig, tp: int) -> int:
        return model.language.hidden_size

    def cost(self, model: ModelConfig, work: Workload, number: int) -> LayerCost:
        return LayerCost(model.language.hidden_size, 0.0)

    def saved_bytes(self, scenario: Scenario, *, trained: bool, core_attention: bool) -> float:
        tokens = scenario.work.tokens / scenario.sequence_shards
        language = scenario.model.language
        return norm_bytes(scenario, tokens, language.hidden_size, language.normalization)


class MtpInput(LayerKind):
    """Input of multi-token prediction: norms of hidden states and of later embeddings, and a replicated matrix."""

    reads = Stream.TEXT
    launches = (4, 7)
    cpu_calls = 4

    def parameters(self, model: ModelConfig, tp: int) -> int:
        hidden = model.language.hidden_size
        return 2 * hidden * hidden + 2 * hidden

    def hidden_weights(self, model: ModelConfig) -> Mapping[str, HiddenWeight]:
        hidden = model.language.hidden_size
        return {"projection.weight": hidden_weight(2 * hidden, hidden)}

    def cost(self, model: ModelConfig, work: Workload, number: int) -> LayerCost:
        weights = 2 * model.language.hidden_size**2
        return LayerCost(weights, 2.0 * weights * work.tokens)

    def saved_bytes(self, scenario: Scenario, *, trained: bool, core_attention: bool) -> float:
        """Return the bytes that both norms save, and those of the matrix's input, the two norms' outputs."""
        language, tokens = scenario.model.language, scenario.work.tokens / scenario.sequence_shards
        norm = norm_bytes(scenario, tokens, language.hidden_size, language.normalization)
        return 2 * norm + 2 * tokens * language.hidden_size * scenario.bytes_each


class Output(LayerKind):
    """Output layer with its cross entropy. A model that embeds texts has a pooling instead, at next to no cost."""

    reads = Stream.TEXT
    cpu_calls = 8

    def parameters(self, model: ModelConfig, tp: int) -> int:
        """Return the parameters on one rank.

        The number is 0 if weights are tied: the embedding counts them, and a copy on another chunk takes
        `vocabulary_shard` more.
        """
        if objective_of(model).pools:
            head = model.language.hidden_size * objective_of(model).scores
            return head + len(learned_scalars(model))
        return 0 if model.language.tie_embeddings else vocabulary_shard(model, tp)

    def cost(self, model: ModelConfig, work: Workload, number: int) -> LayerCost:
        if objective_of(model).pools:
            return LayerCost(0, 0.0)
        weights = vocabulary(model) * model.language.hidden_size
        predicted = work.trained_tokens * (1 + model.language.mtp_layers)
        return LayerCost(0 if model.language.tie_embeddings else weights, 2.0 * weights * predicted)

    def products(self, scenario: Scenario, *, trained: bool, reached: bool) -> tuple[int, int]:
        """Return the FLOPs of a forward pass and of a backward pass, as multiples of the forward FLOPs.

        The forward pass computes the gradient of the input. The backward pass computes the gradient of the weight, and
        may recompute the logits.
        """
        return 1 + reached, trained * (1 + computes_logits_again(scenario))

    def saved_bytes(self, scenario: Scenario, *, trained: bool, core_attention: bool) -> float:
        if objective_of(scenario.model).pools:
            return _pooled_bytes(scenario)
        count, e = predictions(scenario), scenario.bytes_each
        reached = scenario.gradient_reaches[scenario.names.index(OUTPUT)]
        # Hidden states and their gradient, which sequence parallelism does not shard here.
        saved = count * scenario.model.language.hidden_size * e * (trained + reached)
        if not trained:
            return saved
        # The logits' gradient; or for each position the label, the loss, the largest logit and the sum.
        return saved + (count * (3 * FP32 + 8) if computes_logits_again(scenario) else logits_bytes(scenario))

    def waiting_bytes(self, scenario: Scenario) -> float:
        hidden = predictions(scenario) * scenario.model.language.hidden_size * scenario.bytes_each
        return hidden + (0.0 if computes_logits_again(scenario) else logits_bytes(scenario))

    def communication(self, scenario: Scenario) -> Communication:
        if objective_of(scenario.model).pools:  # pooled states alone
            return Communication()
        depths, text = 1 + scenario.model.language.mtp_layers, stream_bytes(Stream.TEXT, scenario)
        count = predictions(scenario)
        chunks = max(1, -(-count // scenario.loss_chunk))
        # Two all-reduces per chunk of positions in the forward pass alone: of the largest logit, and of the label's
        # logit with the sum.
        return Communication((text * depths,), (count * FP32 / chunks, 2 * count * FP32 / chunks) * chunks)


def _pooled_bytes(scenario: Scenario) -> float:
    """Return the bytes that pooling saves: all hidden states in fp32 for the mean, else next to nothing."""
    if scenario.model.objective.pooling != "mean":
        return 0.0
    return scenario.work.tokens * (scenario.model.language.hidden_size * FP32 + 8)


def predictions(scenario: Scenario) -> int:
    """Return the number of predictions in a micro-batch's loss: 1 + `mtp_layers` for each trained token."""
    return scenario.work.trained_tokens * (1 + scenario.model.language.mtp_layers)


def vocabulary(model: ModelConfig) -> int:
    """Return the vocabulary size, which must have been filled in from the tokenizer."""
    assert model.language.vocab_size is not None, "the vocabulary's size is known once the tokenizer is: config.resolve"
    return model.language.vocab_size


def vocabulary_shard(model: ModelConfig, tp: int) -> int:
    """Return the number of embedding parameters on one rank; rows are padded to a multiple of TP."""
    return -(-vocabulary(model) // tp) * model.language.hidden_size


def logit_columns(scenario: Scenario) -> int:
    """Return the number of columns of the logits on a tensor-parallel rank."""
    return -(-vocabulary(scenario.model) // scenario.dims.tp)


def computes_logits_again(scenario: Scenario) -> bool:
    """Return whether the backward pass of a trained output layer recomputes the logits."""
    return predictions(scenario) > scenario.loss_chunk and not objective_of(scenario.model).pools


def logits_bytes(scenario: Scenario) -> float:
    """Return the bytes of logits that a rank has in memory at a time while it computes the loss."""
    if objective_of(scenario.model).pools:
        return 0.0
    return min(scenario.loss_chunk, predictions(scenario)) * logit_columns(scenario) * scenario.bytes_each
