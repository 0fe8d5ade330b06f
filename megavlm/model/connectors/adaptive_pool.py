"""Average pooling of any grid and a tensor-parallel MLP (`megavlm/arch/connectors/adaptive_pool.py`)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from megavlm.arch.connectors.adaptive_pool import ADAPTIVE_POOL
from megavlm.arch.image_tokens import Grid, TileGroup
from megavlm.model.connector import ConnectorModule
from megavlm.model.resampler import ResamplerMlp
from megavlm.model.specs import LayerBuilder
from megavlm.model.vision_ops import images_of


class AdaptivePool(ConnectorModule):
    """Means over rectangles of patches, in row-major order, and an MLP."""

    def __init__(self, builder: LayerBuilder) -> None:
        super().__init__(builder)
        self.mlp = ResamplerMlp(self.config, self.tp_group, ADAPTIVE_POOL.mlp(self.model), F.gelu)

    def features(self, patches: Tensor, grids: tuple[Grid, ...], tile_groups: Sequence[TileGroup]) -> Tensor:
        pooled = []
        for images in images_of(patches, grids):
            sides = ADAPTIVE_POOL.pooled((images.shape[1], images.shape[2]), self.model.projector)
            means = F.adaptive_avg_pool2d(images.permute(0, 3, 1, 2), sides)
            pooled.append(means.permute(0, 2, 3, 1).flatten(0, 2))
        return self.mlp(torch.cat(pooled)[:, None])
