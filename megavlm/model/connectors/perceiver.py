"""Idefics2's Perceiver resampler, tensor-parallel (`megavlm/arch/connectors/perceiver.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megavlm.arch.connectors.perceiver import PERCEIVER
from megavlm.arch.image_tokens import Grid, TileGroup
from megavlm.config.schema import ModelConfig
from megavlm.model.connector import ConnectorModule
from megavlm.model.norm import Norm
from megavlm.model.resampler import ResamplerAttention, ResamplerMlp, ResamplerPart
from megavlm.model.specs import LayerBuilder


class PerceiverLayer(ResamplerPart):
    """x + attention(norm(x) to [norm(patches); norm(x)]), then x + mlp(norm(x))."""

    def __init__(self, config: Any, group: Any, model: ModelConfig) -> None:
        super().__init__(config, group)
        width, epsilon = model.language.hidden_size, PERCEIVER.own(model).norm_epsilon
        self.latents_norm = Norm(config, width, epsilon)
        self.context_norm = Norm(config, width, epsilon)
        self.attention = ResamplerAttention(config, group, PERCEIVER.attention(model))
        self.mlp_norm = Norm(config, width, epsilon)
        self.mlp = ResamplerMlp(config, group, PERCEIVER.mlp(model), F.silu)

    def forward(self, x: Tensor, count: int, patches: Tensor, lengths: Sequence[int]) -> Tensor:
        """Return new latents [I·Q, 1, W], from latents and `patches` [P, 1, W], `lengths[i]` of image i."""
        own, context = self.shared(self.latents_norm(x)), self.shared(self.context_norm(patches))
        x = x + self.attention(own, count, (context, lengths), (own, [count] * len(lengths)))
        return x + self.mlp(self.mlp_norm(x))


class Perceiver(ConnectorModule):
    """Perceiver resampler: an MLP for patches, learned latents [Q, W], layers, and a norm."""

    def __init__(self, builder: LayerBuilder) -> None:
        super().__init__(builder)
        own, model = PERCEIVER.own(self.model), self.model
        width = model.language.hidden_size
        normed = replace(self.config, normalization="RMSNorm")
        self.count = own.num_latents
        self.projection = ResamplerMlp(self.config, self.tp_group, PERCEIVER.projection(model), F.silu)
        self.latents = nn.Parameter(torch.empty(own.num_latents, width, dtype=self.config.params_dtype))
        layers = [PerceiverLayer(normed, self.tp_group, model) for _ in range(own.num_layers)]
        self.layers = ResamplerPart(self.config, self.tp_group, layers)
        self.norm = Norm(normed, width, own.norm_epsilon)

    def features(self, patches: Tensor, grids: tuple[Grid, ...], tile_groups: Sequence[TileGroup]) -> Tensor:
        lengths = [rows * columns for rows, columns in grids]
        projected = self.projection(patches[:, None])
        x = self.latents.repeat(len(lengths), 1)[:, None]
        for layer in self.layers.children():
            x = layer(x, self.count, projected, lengths)
        return self.norm(x)
