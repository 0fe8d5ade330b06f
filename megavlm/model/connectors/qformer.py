"""BLIP-2's Q-Former, tensor-parallel (`megavlm/arch/connectors/qformer.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megavlm.arch.connectors.qformer import QFORMER
from megavlm.arch.image_tokens import Grid, TileGroup
from megavlm.config.schema import ModelConfig
from megavlm.model.connector import ConnectorModule
from megavlm.model.norm import Norm
from megavlm.model.resampler import ResamplerAttention, ResamplerMlp, ResamplerPart
from megavlm.model.specs import LayerBuilder


class QFormerLayer(ResamplerPart):
    """norm(x + block(x)) for self-attention of queries, attention to patches if the layer has it, and the MLP."""

    def __init__(self, config: Any, group: Any, model: ModelConfig, *, cross: bool) -> None:
        super().__init__(config, group)
        own = QFORMER.own(model)
        self.self_attention = ResamplerAttention(config, group, QFORMER.attention(model, cross=False))
        self.self_norm = Norm(config, own.hidden_size, own.norm_epsilon)
        self.cross_attention = self.cross_norm = None
        if cross:
            self.cross_attention = ResamplerAttention(config, group, QFORMER.attention(model, cross=True))
            self.cross_norm = Norm(config, own.hidden_size, own.norm_epsilon)
        self.mlp = ResamplerMlp(config, group, QFORMER.mlp(model), F.gelu)
        self.mlp_norm = Norm(config, own.hidden_size, own.norm_epsilon)

    def forward(self, x: Tensor, count: int, patches: Tensor, lengths: Sequence[int]) -> Tensor:
        """Return new queries [I·Q, 1, W], from queries and `shared` patches [P, 1, Hv], `lengths[i]` of image i."""
        own = self.shared(x)
        x = self.self_norm(x + self.self_attention(own, count, (own, [count] * len(lengths))))
        if self.cross_attention is not None and self.cross_norm is not None:
            x = self.cross_norm(x + self.cross_attention(self.shared(x), count, (patches, lengths)))
        return self.mlp_norm(x + self.mlp(x))


class QFormer(ConnectorModule):
    """Q-Former: learned queries [Q, W], layers, and a linear layer to the language model's width."""

    def __init__(self, builder: LayerBuilder) -> None:
        super().__init__(builder)
        own, dtype, model = QFORMER.own(self.model), self.config.params_dtype, self.model
        self.count = own.num_queries
        self.queries = nn.Parameter(torch.empty(own.num_queries, own.hidden_size, dtype=dtype))
        self.norm = Norm(self.config, own.hidden_size, own.norm_epsilon)
        layers = (
            QFormerLayer(self.config, self.tp_group, model, cross=number in QFORMER.crossing(model))
            for number in range(own.num_layers)
        )
        self.layers = ResamplerPart(self.config, self.tp_group, list(layers))
        self.projection = nn.Linear(own.hidden_size, model.language.hidden_size, dtype=dtype)

    def features(self, patches: Tensor, grids: tuple[Grid, ...], tile_groups: Sequence[TileGroup]) -> Tensor:
        lengths = [rows * columns for rows, columns in grids]
        shared = self.layers.shared(patches)[:, None]
        x = self.norm(self.queries).repeat(len(lengths), 1)[:, None]
        for layer in self.layers.children():
            x = layer(x, self.count, shared, lengths)
        return self.projection(x)
