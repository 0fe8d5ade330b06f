"""A connector with a fixed number of tokens per image: each token is a weighted mean of the image's patches.

`--extension pooled_attention --projector-kind pooled` trains with it. This file has all that the program must know of
it without torch; `module.py` has the layers, and is imported only where a model is built.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from megavlm.extension import (
    AT_LEAST_1,
    Communication,
    Connector,
    Extension,
    Grid,
    LayerCost,
    ModelConfig,
    ProjectorConfig,
    Scenario,
    Split,
    Stream,
    Workload,
    option,
    stream_bytes,
)


@dataclass(frozen=True)
class PooledOptions:
    """Options of the connector, in the section `model.projector.connectors.pooled`."""

    tokens: int = option(8, "Image tokens of each image.", valid=AT_LEAST_1)
    width: int = option(None, "Channels of a pooled feature; default: model.language.hidden_size.", valid=AT_LEAST_1)


class Pooled(Connector):
    """Connector with F tokens, each softmax(scores of the patches) · values, projected to the language width."""

    name = "pooled"
    options = PooledOptions
    module = "pooled_attention.module:PooledAttention"
    launches = (20, 24)

    def resolved(self, model: ModelConfig) -> PooledOptions:
        own: PooledOptions = self.own(model)
        return own if own.width is not None else replace(own, width=model.language.hidden_size)

    def tokens_per_grid(self, grid: Grid, projector: ProjectorConfig) -> int:
        tokens: int = projector.connectors.pooled.tokens
        return tokens

    def splits(self, model: ModelConfig) -> Mapping[str, Split]:
        width = self.own(model).width
        return {"values.weight": Split(0, width), "values.bias": Split(0, width), "output.weight": Split(1, width)}

    def parameters(self, model: ModelConfig, tp: int) -> int:
        own, vision, language = self.own(model), model.vision.hidden_size, model.language.hidden_size
        share = -(-own.width // tp)
        scores, values, output = own.tokens * (vision + 1), share * (vision + 1), (share + 1) * language
        return int(scores + values + output)

    def cost(self, model: ModelConfig, work: Workload) -> LayerCost:
        own, vision, language = self.own(model), model.vision.hidden_size, model.language.hidden_size
        of_patches, of_features = (own.tokens + own.width) * vision, own.width * language
        pooling = 2.0 * work.patches * own.tokens * own.width
        flops = 2.0 * (of_patches * work.patches + of_features * work.features) + pooling
        return LayerCost(of_patches + of_features, flops)

    def saved_bytes(self, scenario: Scenario, *, trained: bool) -> float:
        own, work, e = self.own(scenario.model), scenario.work, scenario.bytes_each
        share = -(-own.width // scenario.dims.tp)
        patches = work.patches * scenario.model.vision.hidden_size * e * trained
        weights, values = 2 * work.patches * own.tokens * e, work.patches * share * e
        return patches + weights + values + work.features * share * e * trained + work.patches * 8

    def communication(self, scenario: Scenario) -> Communication:
        patches, features = (stream_bytes(stream, scenario) for stream in (Stream.PATCHES, Stream.FEATURES))
        # An all-reduce of features in the forward pass, and one of the gradients of patches in the backward pass.
        return Communication((patches,) * scenario.sequence_parallel, (features, features))


EXTENSION = Extension(connectors=(Pooled(),))
