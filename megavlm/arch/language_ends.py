"""The language model's kinds that are not transformer layers: embedding, last norm, output with its loss."""

from __future__ import annotations

from megavlm.arch.kind import FP32, Communication, LayerCost, LayerKind, Stream, norm_bytes, stream_bytes
from megavlm.arch.scenario import Scenario
from megavlm.arch.workload import Workload
from megavlm.config.schema import ModelConfig


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
    reads = Stream.TEXT
    cpu_calls = 8

    def parameters(self, model: ModelConfig, tp: int) -> int:
        """Tied weights count with the embedding; a copy in another chunk takes `vocabulary_shard` more."""
        return 0 if model.language.tie_embeddings else vocabulary_shard(model, tp)

    def cost(self, model: ModelConfig, work: Workload, number: int) -> LayerCost:
        weights = vocabulary(model) * model.language.hidden_size
        return LayerCost(0 if model.language.tie_embeddings else weights, 2.0 * weights * work.tokens)

    def saved_bytes(self, scenario: Scenario, *, trained: bool, core_attention: bool) -> float:
        hidden, e = scenario.model.language.hidden_size, scenario.bytes_each
        # The logits, their largest and the sum; which column is the label's.
        position = logit_columns(scenario) * e + 3 * FP32 + 5
        return scenario.work.tokens * (hidden / scenario.sequence_shards * e * trained + position)

    def communication(self, scenario: Scenario) -> Communication:
        tokens, text = scenario.work.tokens, stream_bytes(Stream.TEXT, scenario)
        # The largest logit, the label's logit and the sum, each an all-reduce.
        return Communication((text,), (tokens * FP32,) * 6)


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
