"""The language model's kinds that are not transformer layers: embedding, last norm, output with its loss."""

from __future__ import annotations

from megavlm.arch.kind import FP32, Communication, LayerCost, LayerKind, Stream, norm_bytes, stream_bytes
from megavlm.arch.layers import OUTPUT
from megavlm.arch.objectives import learned_scalars, objective_of
from megavlm.arch.scenario import Scenario
from megavlm.arch.workload import Workload
from megavlm.config.schema import ModelConfig

LOSS_WORK = 2**25  # bytes of fp32 logits that `model/cross_entropy.py` makes at a time: about a GPU's second cache


class Embedding(LayerKind):
    """Token embeddings, with image features merged in."""

    reads = Stream.FEATURES
    launches = (2, 5)
    cpu_calls = 2

    def parameters(self, model: ModelConfig, tp: int) -> int:
        return vocabulary_shard(model, tp)

    def cost(self, model: ModelConfig, work: Workload, number: int) -> LayerCost:
        return LayerCost(vocabulary(model) * model.language.hidden_size, 0.0)

    def saved_bytes(self, scenario: Scenario, *, trained: bool, core_attention: bool) -> float:
        return stream_bytes(Stream.FEATURES, scenario) + (scenario.work.tokens + scenario.work.features) * 8

    def communication(self, scenario: Scenario) -> Communication:
        text = stream_bytes(Stream.TEXT, scenario)
        return Communication(reductions=(text, text))  # the two halves of an all-reduce of whole embeddings


class LanguageNorm(LayerKind):
    reads = Stream.TEXT
    launches = (1, 2)

    def parameters(self, model: ModelConfig, tp: int) -> int:
        return model.language.hidden_size

    def cost(self, model: ModelConfig, work: Workload, number: int) -> LayerCost:
        return LayerCost(model.language.hidden_size, 0.0)

    def saved_bytes(self, scenario: Scenario, *, trained: bool, core_attention: bool) -> float:
        tokens = scenario.work.tokens / scenario.sequence_shards
        return norm_bytes(scenario, tokens, scenario.model.language.hidden_size, "RMSNorm")

    def communication(self, scenario: Scenario) -> Communication:
        return Communication()


class Output(LayerKind):
    """Logits and their cross entropy; of a model that embeds texts, a pooling that costs next to nothing."""

    reads = Stream.TEXT
    cpu_calls = 8

    def parameters(self, model: ModelConfig, tp: int) -> int:
        """Tied weights count with the embedding; a copy in another chunk takes `vocabulary_shard` more."""
        if objective_of(model).embeds:
            return len(learned_scalars(model))
        return 0 if model.language.tie_embeddings else vocabulary_shard(model, tp)

    def cost(self, model: ModelConfig, work: Workload, number: int) -> LayerCost:
        if objective_of(model).embeds:
            return LayerCost(0, 0.0)
        weights = vocabulary(model) * model.language.hidden_size
        return LayerCost(0 if model.language.tie_embeddings else weights, 2.0 * weights * work.trained_tokens)

    def products(self, scenario: Scenario, *, trained: bool, reached: bool) -> tuple[int, int]:
        """The input's gradient is computed beside the loss; the weight's from logits that may be computed again."""
        return 1 + reached, trained * (1 + computes_logits_again(scenario))

    def saved_bytes(self, scenario: Scenario, *, trained: bool, core_attention: bool) -> float:
        if objective_of(scenario.model).embeds:
            return _pooled_bytes(scenario)
        count, e = scenario.work.trained_tokens, scenario.bytes_each
        reached = scenario.gradient_reaches[scenario.names.index(OUTPUT)]
        # Hidden states and their gradient, of whole rows also under sequence parallelism.
        saved = count * scenario.model.language.hidden_size * e * (trained + reached)
        if not trained:
            return saved
        # The logits' gradient; or the label, and the loss, largest logit and sum, of each position.
        return saved + (count * (3 * FP32 + 8) if computes_logits_again(scenario) else logits_bytes(scenario))

    def waiting_bytes(self, scenario: Scenario) -> float:
        hidden = scenario.work.trained_tokens * scenario.model.language.hidden_size * scenario.bytes_each
        return hidden + (0.0 if computes_logits_again(scenario) else logits_bytes(scenario))

    def communication(self, scenario: Scenario) -> Communication:
        if objective_of(scenario.model).embeds:  # pooled states alone
            return Communication()
        count, text = scenario.work.trained_tokens, stream_bytes(Stream.TEXT, scenario)
        chunks = max(1, -(-count // scenario.loss_chunk))
        # The largest logit; the label's logit and the sum: two all-reduces a chunk, of two halves each, forward only.
        # Half of them stand for all, as the backward pass is taken to exchange what the forward pass does.
        return Communication((text,), (count * FP32 / chunks, 2 * count * FP32 / chunks) * chunks)


def _pooled_bytes(scenario: Scenario) -> float:
    """Return what pooling saves: the states of all tokens in fp32 with the mean, else next to nothing."""
    if scenario.model.objective.pooling == "last":
        return 0.0
    return scenario.work.tokens * (scenario.model.language.hidden_size * FP32 + 8)


def vocabulary(model: ModelConfig) -> int:
    """Return the vocabulary size; the caller must have filled in the tokenizer's size if it was not given."""
    assert model.language.vocab_size is not None, "the vocabulary's size is known once the tokenizer is: config.resolve"
    return model.language.vocab_size


def vocabulary_shard(model: ModelConfig, tp: int) -> int:
    """Return the parameters of one rank's rows of the embedding, whose number is rounded up to a multiple of TP."""
    return -(-vocabulary(model) // tp) * model.language.hidden_size


def logit_columns(scenario: Scenario) -> int:
    """Return how many columns of the logits a tensor-parallel rank holds."""
    return -(-vocabulary(scenario.model) // scenario.dims.tp)


def computes_logits_again(scenario: Scenario) -> bool:
    """Return whether a trained output layer computes logits in the backward pass as well."""
    return scenario.work.trained_tokens > scenario.loss_chunk and not objective_of(scenario.model).embeds


def logits_bytes(scenario: Scenario) -> float:
    """Return the bytes of the logits that a rank has at a time while it computes the loss."""
    if objective_of(scenario.model).embeds:
        return 0.0
    return min(scenario.loss_chunk, scenario.work.trained_tokens) * logit_columns(scenario) * scenario.bytes_each
