"""Connector `adaptive_pool`: average pooling to a fixed number of tokens, or by a fixed factor, then an MLP."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from megavlm.arch.connector import Connector, HfNames
from megavlm.arch.image_tokens import Grid
from megavlm.arch.kind import Communication, LayerCost, Stream, stream_bytes
from megavlm.arch.resampler import MlpBlock
from megavlm.arch.scenario import Scenario
from megavlm.arch.workload import Workload
from megavlm.config.option import Count, filled, option
from megavlm.config.schema import Config, ModelConfig, ProjectorConfig


@dataclass(frozen=True)
class AdaptivePoolConfig:
    """Options of the connector `adaptive_pool`."""

    side: Count | None = option(None, "Rows and columns of image tokens of each image; default: 12 without `factor`.")
    factor: Count | None = option(
        None, "Patches along each side of an image that become one token, rounded up; default: none."
    )
    hidden_size: Count = option(None, "Inner width of the MLP after pooling; default: model.language.hidden_size.")


class AdaptivePool(Connector):
    """Average pooling over rectangles of patches, as equal as the grid allows, then linear, GELU, linear."""

    name = "adaptive_pool"
    options = AdaptivePoolConfig
    module = "megavlm.model.connectors.adaptive_pool:AdaptivePool"
    launches = (20, 20)

    def resolved(self, model: ModelConfig) -> AdaptivePoolConfig:
        own: AdaptivePoolConfig = self.own(model)
        side = 12 if own.factor is None else None
        return filled(own, hidden_size=model.language.hidden_size, side=side)

    def problems(self, config: Config) -> Iterator[str]:
        own: AdaptivePoolConfig = self.own(config.model)
        if own.side is not None and own.factor is not None:
            yield (
                "model.projector.connectors.adaptive_pool.side and model.projector.connectors.adaptive_pool.factor "
                "cannot be combined: leave one of them out"
            )

    def pooled(self, grid: Grid, projector: ProjectorConfig) -> tuple[int, int]:
        """Return the rows and columns of tokens that a grid of patches is pooled to."""
        own: AdaptivePoolConfig = projector.connectors.adaptive_pool
        if own.factor is not None:
            return -(-grid[0] // own.factor), -(-grid[1] // own.factor)
        side = own.side or 12
        return side, side

    def tokens_per_grid(self, grid: Grid, projector: ProjectorConfig) -> int:
        rows, columns = self.pooled(grid, projector)
        return rows * columns

    def mlp(self, model: ModelConfig) -> MlpBlock:
        """Return the MLP after the pooling."""
        return MlpBlock(
            model.vision.hidden_size, self.own(model).hidden_size, model.language.hidden_size, gated=False, bias=True
        )

    def blocks(self, model: ModelConfig) -> Mapping[str, MlpBlock]:
        return {"mlp": self.mlp(model)}

    def hf_names(self, model: ModelConfig) -> tuple[HfNames, ...]:
        return ({name: name for name in self.mlp(model).names("mlp")},)

    def exported(self, model: ModelConfig) -> int:
        return 0

    def parameters(self, model: ModelConfig, tp: int) -> int:
        return self.mlp(model).parameters(tp)

    def cost(self, model: ModelConfig, work: Workload) -> LayerCost:
        return LayerCost(self.parameters(model, 1), self.mlp(model).flops(work.features))

    def saved_bytes(self, scenario: Scenario, *, trained: bool) -> float:
        work, width = scenario.work, scenario.model.vision.hidden_size * scenario.bytes_each
        mlp = self.mlp(scenario.model).saved_bytes(scenario, work.features, trained=trained)
        return mlp + work.features * width * trained + work.patches * (width + 8)

    def communication(self, scenario: Scenario) -> Communication:
        patches, features = (stream_bytes(stream, scenario) for stream in (Stream.PATCHES, Stream.IMAGES))
        pooled = scenario.work.features * scenario.model.vision.hidden_size * scenario.bytes_each
        # All-reduces of features in the forward pass, of the gradients of pooled patches in the backward pass.
        return Communication((patches,) * scenario.sequence_parallel, (features, pooled))


ADAPTIVE_POOL = AdaptivePool()
