"""Compute the forward FLOPs of a sample from its lengths, before its pixels are read; plans and MFU count the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megavlm.arch.image_tokens import Grid
from megavlm.arch.kinds import layer_cost
from megavlm.arch.layers import layer_names, part_of
from megavlm.arch.workload import Workload, image_workload, sliding_squares
from megavlm.config.schema import ModelConfig
from megavlm.data.types import SampleCost

_OF_IMAGES = ("patches", "patch_squares", "window_squares", "features")  # fields of `Workload`
_OF_TEXT = ("tokens", "token_squares", "sliding_squares", "trained_tokens")


@dataclass(frozen=True)
class CostModel:
    """The FLOPs of one unit of each field of a workload, of which all FLOPs are a linear function."""

    model: ModelConfig
    vision: tuple[float, ...]  # in the order of `_OF_IMAGES`
    language: tuple[float, ...]  # in the order of `_OF_TEXT`

    @classmethod
    def of(cls, model: ModelConfig) -> CostModel:
        def unit(field: str, *parts: str) -> float:
            work = Workload(**{**dict.fromkeys(Workload.__dataclass_fields__, 0), field: 1})
            names = [name for name in layer_names(model) if part_of(name) in parts]
            return sum(layer_cost(name, model, work).forward_flops for name in names)

        return cls(
            model=model,
            vision=tuple(unit(field, "vision", "projector") for field in _OF_IMAGES),
            language=tuple(unit(field, "language") for field in _OF_TEXT),
        )

    def cost(self, *, length: int, grids: Sequence[Grid], images: int) -> SampleCost:
        """Return the cost of a sample of `length` tokens with `images` images of these grids."""
        work = image_workload(grids, self.model)
        # Which tokens are trained is not known yet: all are counted.
        text = (length, length * length, sliding_squares(length, self.model.language.window_size), length)
        return SampleCost(
            length=length,
            patches=sum(rows * columns for rows, columns in grids),
            images=images,
            vision=sum(unit * getattr(work, field) for unit, field in zip(self.vision, _OF_IMAGES, strict=True)),
            language=sum(unit * count for unit, count in zip(self.language, text, strict=True)),
        )
