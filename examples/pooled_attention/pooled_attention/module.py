"""The torch half of the connector."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region
from torch import Tensor, nn

from megavlm.model.connector import ConnectorModule


class PooledAttention(ConnectorModule):
    """Token n of an image is Σ_p softmax_p(scores_n · patch_p) · values(patch_p), projected.

    The channels of values are sharded over tensor-parallel ranks. The weights of the mean are replicated, and each
    rank's channels give a part of their gradient: `copy_to_tensor_model_parallel_region` sums the parts.
    """

    def __init__(self, builder: Any) -> None:
        super().__init__(builder)
        own, ranks = self.model.projector.connectors.pooled, self.tp_group.size()
        width = -(-own.width // ranks) * ranks  # padded where ranks do not divide it
        common = {"config": self.config, "init_method": self.config.init_method, "tp_group": self.tp_group}
        vision, language = self.model.vision.hidden_size, self.model.language.hidden_size
        self.scores = nn.Linear(vision, own.tokens, dtype=self.config.params_dtype)
        self.values = ColumnParallelLinear(vision, width, bias=True, gather_output=False, **common)
        self.output = RowParallelLinear(
            width, language, bias=True, input_is_parallel=True, skip_bias_add=False, is_expert=False, **common
        )

    def features(self, patches: Tensor, grids: tuple[tuple[int, int], ...], tile_groups: Sequence[Any]) -> Tensor:
        lengths = [rows * columns for rows, columns in grids]
        scores = self.scores(patches).split(lengths)
        weights = torch.cat([image.softmax(0) for image in scores])
        weights = copy_to_tensor_model_parallel_region(weights, group=self.tp_group)
        values, _ = self.values(patches)
        pooled = [w.T @ v for w, v in zip(weights.split(lengths), values.split(lengths), strict=True)]
        out: Tensor = self.output(torch.cat(pooled)[:, None])[0]
        return out
