"""`ConnectorModule`, the torch half of `arch/connector.py`, and the linear and MLP projectors."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from torch import Tensor, nn

from megavlm.arch.image_tokens import Grid, TileGroup, tokens_per_grid
from megavlm.arch.tensor_split import share_of
from megavlm.config.derived import block_channels, block_side, projector_inputs
from megavlm.model.layer_modules import ACTIVATIONS
from megavlm.model.norm import Norm
from megavlm.model.specs import LayerBuilder
from megavlm.model.vision import VisionLayout
from megavlm.model.vision_ops import (
    average_pool,
    channels_first_blocks,
    mean_over_frames,
    pixel_shuffle,
    unpad_and_concat,
)


class ConnectorModule(MegatronModule):
    """Base class of connectors: [V(/TP), 1, Hv] → [F, 1, Hl], the same on all tensor-parallel ranks.

    All ranks compute the same features from the same patches, and the features are merged into text embeddings of whole
    sequences, which are scattered afterwards. So replicated weights get equal gradients. Matrices may be sharded by
    megatron-core's parallel layers, built with `self.config` (without sequence parallelism) and `self.tp_group`. A
    container of such layers must be a MegatronModule, because a ModuleList would be saved as if it were replicated.
    """

    def __init__(self, builder: LayerBuilder) -> None:
        super().__init__(config=builder.connector)
        assert not self.config.sequence_parallel
        self.model = builder.config.model
        self.tp_group = builder.groups.collection.tp

    def forward(
        self, hidden: Tensor, layout: VisionLayout, *, tile_groups: Sequence[TileGroup], sequence_parallel: bool
    ) -> Tensor:
        """Return the features of a micro-batch. In models of tiled images, `tile_groups` join tiles to images."""
        if sequence_parallel:
            # All ranks compute the rest identically: its gradient is whole, and the backward pass takes a slice.
            hidden = gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=False, group=self.tp_group
            )
        patches = hidden[:, 0].index_select(0, layout.patch_index(hidden.device))
        return self.features(*mean_over_frames(patches, layout.grids), tile_groups)

    @abstractmethod
    def features(self, patches: Tensor, grids: tuple[Grid, ...], tile_groups: Sequence[TileGroup]) -> Tensor:
        """Return the features [F, 1, Hl] of consecutive images from their row-major patches [P, Hv]."""


MERGES = {
    "concatenate": pixel_shuffle,
    "average": average_pool,
    "standardized_average": average_pool,
    "convolution": channels_first_blocks,
}


class Projector(ConnectorModule):
    """The linear or MLP projector: [V(/TP), 1, Hv] → [F, 1, Hl], the same on all tensor-parallel ranks.

    The MLP is tensor-parallel without sequence parallelism: pixel shuffle needs neighbouring patches together, and
    the features are merged into text embeddings of whole sequences.
    """

    std_scale: Tensor | None
    std_bias: Tensor | None

    def __init__(self, builder: LayerBuilder, *, norm_epsilon: float | None = None) -> None:
        """Build the projector. With `norm_epsilon` it has a norm of patches or merged features in any configuration."""
        super().__init__(builder)
        model, layer_config = self.model, self.config
        self.projector = model.projector
        self.merge = MERGES[model.projector.merge]
        inputs = projector_inputs(model)
        outputs = model.language.hidden_size
        # Padded where TP does not divide them.
        tp = self.tp_group.size()
        hidden, gathered = share_of(model.projector.hidden_size, tp) * tp, share_of(outputs, tp) * tp
        self.outputs = outputs
        dtype = layer_config.params_dtype
        self.norm: nn.Module = nn.Identity()
        if norm_epsilon is None and self.projector.input_norm:
            norm_epsilon = self.projector.norm_epsilon
        if norm_epsilon is not None:
            normed = model.vision.hidden_size if self.projector.norm_before_merge else inputs
            weighted = self.projector.normalization != "UnitRMSNorm"
            self.norm = Norm(layer_config, normed, norm_epsilon, weighted=weighted)
        given = self.projector.merge == "standardized_average"
        self.register_buffer("std_scale", torch.ones(inputs, dtype=dtype) if given else None)
        self.register_buffer("std_bias", torch.zeros(inputs, dtype=dtype) if given else None)
        # Replicated like its inputs and outputs: it needs no communication.
        self.convolution: nn.Module = nn.Identity()
        if self.projector.merge == "convolution":
            self.convolution = nn.Linear(block_channels(model), inputs, bias=self.projector.merge_bias, dtype=dtype)
        bias = model.projector.bias
        tiled = self.projector.anyres_max_tiles is not None
        self.image_newline = nn.Parameter(torch.empty(outputs, dtype=dtype)) if tiled else None
        common = {"config": layer_config, "init_method": layer_config.init_method, "tp_group": self.tp_group}
        self.linear_in = self.linear_gate = self.linear_fc2 = None
        self.inner_norm: nn.Module = nn.Identity()
        if model.projector.kind == "deep_mlp":
            self.linear_in = ColumnParallelLinear(inputs, hidden, bias=bias, gather_output=True, **common)
            inputs = model.projector.hidden_size
        if model.projector.kind == "gated":
            self.linear_in = ColumnParallelLinear(inputs, gathered, bias=bias, gather_output=True, **common)
            self.inner_norm = Norm(layer_config, outputs, self.projector.norm_epsilon)
            self.linear_gate = ColumnParallelLinear(outputs, hidden, bias=bias, gather_output=False, **common)
            inputs = outputs
        self.inner = inputs
        if model.projector.kind == "linear":
            self.linear_fc1 = ColumnParallelLinear(inputs, gathered, bias=bias, gather_output=True, **common)
        else:
            rows = hidden * (2 if model.projector.kind == "swiglu" else 1)
            self.linear_fc1 = ColumnParallelLinear(inputs, rows, bias=bias, gather_output=False, **common)
            self.linear_fc2 = RowParallelLinear(
                hidden, outputs, bias=bias, input_is_parallel=True, skip_bias_add=False, is_expert=False, **common
            )

    def features(self, patches: Tensor, grids: tuple[Grid, ...], tile_groups: Sequence[TileGroup]) -> Tensor:
        first = self.projector.norm_before_merge
        merged, factor = self.norm(patches) if first else patches, block_side(self.model)
        merged = self.convolution(merged if factor == 1 else self.merge(merged, grids, factor))
        if self.std_scale is not None and self.std_bias is not None:
            # Computed in fp32, because the difference of two large numbers loses digits in bf16.
            wide = merged.float() * merged.shape[-1] ** 0.5 - self.std_bias.float()
            merged = (wide * self.std_scale.float()).to(merged.dtype)
        out = self._projected((merged if first else self.norm(merged))[:, None])
        newline, most = self.image_newline, self.projector.anyres_max_tiles
        if newline is None or most is None:
            return out
        # Computed identically on every tensor-parallel rank: the newline's gradient needs no reduction.
        counts = [tokens_per_grid(grid, self.projector) for grid in grids]
        return unpad_and_concat(out[:, 0], tile_groups, counts, newline=newline, max_tiles=most)[:, None]

    def _projected(self, features: Tensor) -> Tensor:
        """Return the features [F, 1, Hl] of merged patches [F, 1, inputs]."""
        if self.linear_in is not None:
            features, _ = self.linear_in(features)
            features = F.gelu(self.inner_norm(features[..., : self.inner]))
        out, _ = self.linear_fc1(features)
        if self.linear_fc2 is None:
            return out[..., : self.outputs]
        if self.projector.kind == "swiglu":
            inner = ACTIVATIONS["swiglu"](out)
        elif self.linear_gate is not None:
            inner = F.silu(self.linear_gate(features)[0]) * out
        else:
            inner = F.gelu(out)
        out, _ = self.linear_fc2(inner)
        return out
