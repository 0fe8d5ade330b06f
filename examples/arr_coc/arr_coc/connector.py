"""The torch-free half of `arr_coc`, for the planner, the data and checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from arr_coc.options import ArrCoc
from megavlm.extension import (
    Communication,
    Config,
    Connector,
    Grid,
    LayerCost,
    ModelConfig,
    ProjectorConfig,
    Scenario,
    Split,
    Stream,
    UserError,
    Workload,
    stream_bytes,
)

FP32 = 4  # bytes


class ArrCocKind(Connector):
    """Connector with `budget` tokens per image: the content decides where they are, not how many."""

    name = "arr_coc"
    options = ArrCoc
    module = "arr_coc.module:ArrCocConnector"
    launches = (60, 60)

    def problems(self, config: Config) -> Iterator[str]:
        """Yield a line if the regions cannot share the budget, or TP does not divide the MLP."""
        own: ArrCoc = self.own(config.model)
        count, tp = own.regions**2, config.parallel.tensor_model_parallel_size
        if not count * own.fewest <= own.budget <= count * own.most:
            yield (
                f"model.projector.connectors.arr_coc.budget {own.budget} cannot be shared by {count} regions of "
                f"{own.fewest} to {own.most} tokens: set it between {count * own.fewest} and {count * own.most}"
            )
        if own.hidden_size % tp:
            yield (
                f"model.projector.connectors.arr_coc.hidden_size {own.hidden_size} is not divisible by TP {tp}: choose "
                "a multiple"
            )

    def tokens_per_grid(self, grid: Grid, projector: ProjectorConfig) -> int:
        own: ArrCoc = projector.connectors.arr_coc
        if min(grid) < own.regions:
            raise UserError(
                f"a grid of {grid[0]}×{grid[1]} patches has no {own.regions}×{own.regions} regions: enlarge the "
                "images, or lower model.projector.connectors.arr_coc.regions"
            )
        return own.budget

    def smallest_grid(self, projector: ProjectorConfig) -> Grid:
        own: ArrCoc = projector.connectors.arr_coc
        return own.regions, own.regions

    def _mlp(self, model: ModelConfig, tp: int) -> int:
        own: ArrCoc = self.own(model)
        return own.hidden_size // tp * (model.vision.hidden_size + model.language.hidden_size)

    def _scorers(self, model: ModelConfig) -> int:
        own: ArrCoc = self.own(model)
        return model.vision.hidden_size * (2 * own.scorer_size + own.queries) + 2 * own.scorer_size

    def parameters(self, model: ModelConfig, tp: int) -> int:
        own: ArrCoc = self.own(model)
        biases = own.hidden_size // tp + model.language.hidden_size + 2 * own.scorer_size + 2
        return self._mlp(model, tp) + self._scorers(model) + biases

    def cost(self, model: ModelConfig, work: Workload) -> LayerCost:
        """Return the work: each patch is scored, each token sums over the patches of its image and passes the MLP."""
        pooling = _pairs(work) * model.vision.hidden_size
        products = work.patches * self._scorers(model) + pooling + work.features * self._mlp(model, 1)
        return LayerCost(self._mlp(model, 1) + self._scorers(model), 2.0 * products)

    def saved_bytes(self, scenario: Scenario, *, trained: bool) -> float:
        own: ArrCoc = self.own(scenario.model)
        work, e, width = scenario.work, scenario.bytes_each, scenario.model.vision.hidden_size
        of_patches = work.patches * (width * e * 3 + own.scorer_size * e * 4 + own.queries * e + 6 * FP32 + 8)
        weights = _pairs(work) * (3 * FP32 + e)
        mlp = work.features * (width + 2 * own.hidden_size // scenario.dims.tp) * e
        return of_patches + weights + mlp

    def communication(self, scenario: Scenario) -> Communication:
        patches, features = (stream_bytes(stream, scenario) for stream in (Stream.PATCHES, Stream.FEATURES))
        return Communication((patches,) * scenario.sequence_parallel, (features, features))

    def splits(self, model: ModelConfig) -> Mapping[str, Split]:
        hidden = self.own(model).hidden_size
        return {
            "linear_fc1.weight": Split(0, hidden),
            "linear_fc1.bias": Split(0, hidden),
            "linear_fc2.weight": Split(1, hidden),
        }


def _pairs(work: Workload) -> float:
    """Return the number of pairs of a token and a patch of its image, for images with Σ P² / Σ P patches on average."""
    return work.features * work.patch_squares / max(work.patches, 1)


ARR_COC = ArrCocKind()
