"""Compute the forward FLOPs of a sample from its lengths, before its pixels are read; plans and MFU count the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megavlm.arch.kinds import layer_cost
from megavlm.arch.layers import layer_names, part_of
from megavlm.arch.workload import Workload, window_patches, window_squares
from megavlm.config.schema import ModelConfig
from megavlm.data.types import SampleCost


@dataclass(frozen=True)
class CostModel:
    """The FLOPs of one unit of each field of a workload; FLOPs are a linear function of them."""

    vision: tuple[float, float, float]  # per patch, per squared patch count, per squared count in a window
    language: tuple[float, float]  # per token, per squared token count
    window: int
    class_token: int

    @classmethod
    def of(cls, model: ModelConfig) -> CostModel:
        def unit(module: str, **fields: int) -> float:
            work = Workload(**{**dict.fromkeys(Workload.__dataclass_fields__, 0), **fields})
            # The projector runs where the tower does.
            parts = (module,) if module == "language" else ("vision", "projector")
            names = [name for name in layer_names(model) if part_of(name) in parts]
            return sum(layer_cost(name, model, work).forward_flops for name in names)

        return cls(
            vision=(unit("vision", patches=1), unit("vision", patch_squares=1), unit("vision", window_squares=1)),
            language=(unit("language", tokens=1), unit("language", token_squares=1)),
            window=window_patches(model),
            class_token=int(model.vision.class_token),
        )

    def cost(self, *, length: int, grids: Sequence[tuple[int, int]], images: int) -> SampleCost:
        """Return the cost of a sample of `length` tokens with `images` images of these grids."""
        counts = [rows * columns + self.class_token for rows, columns in grids]
        per_patch, per_square, per_window = self.vision
        vision = per_patch * sum(counts) + per_square * sum(count * count for count in counts)
        if self.window:
            vision += per_window * sum(window_squares(grid, self.window) for grid in grids)
        language = self.language[0] * length + self.language[1] * length * length
        patches = sum(rows * columns for rows, columns in grids)
        return SampleCost(length=length, patches=patches, images=images, vision=vision, language=language)
