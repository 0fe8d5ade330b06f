"""Honeybee's C-Abstractor, tensor-parallel (`megavlm/arch/connectors/c_abstractor.py`).

Legend: P positions of all images, c channels of a rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region
from torch import Tensor, nn

from megavlm.arch.anyres import TileGroup
from megavlm.arch.connectors.c_abstractor import C_ABSTRACTOR, ConvBlock
from megavlm.arch.image_tokens import Grid
from megavlm.config.tensor_split import share_of
from megavlm.model.connector import ConnectorModule
from megavlm.model.divided import DividedConvolution, DividedLayerNorm
from megavlm.model.norm import Norm
from megavlm.model.resampler import Mlp, Part
from megavlm.model.vision_ops import images_of, resized_table

if TYPE_CHECKING:
    from megavlm.model.layer_kinds import LayerBuilder


class Block(Part):
    """silu(x + norm(conv3(gated(silu(norm(conv2(silu(norm(conv1(x)))))))))), channels divided from conv1 to conv3."""

    def __init__(self, config: Any, group: Any, block: ConvBlock, epsilon: float) -> None:
        super().__init__(config, group)
        self.width, own = block.width, share_of(block.width, group.size())
        self.conv1 = self.columns(block.inputs, own, bias=False)
        self.norm1 = DividedLayerNorm(config, block.width, epsilon, group)
        self.conv2 = DividedConvolution(config, block.width, group)
        self.norm2 = DividedLayerNorm(config, block.width, epsilon, group)
        self.squeeze = self.rows(own, block.squeeze, bias=True)
        self.excite = self.columns(block.squeeze, own, bias=True)
        self.conv3 = self.rows(own, block.width, bias=False)
        self.norm3 = Norm(config, block.width, epsilon)
        self.shortcut = self.shortcut_norm = None
        if block.projects:
            self.shortcut = self.columns(block.inputs, own, bias=False)
            self.shortcut_norm = Norm(config, block.width, epsilon)

    def forward(self, x: Tensor, grids: Sequence[Grid]) -> Tensor:
        """[P, 1, inputs] → [P, 1, width]; positions are those of images of these grids, row by row."""
        shared = self.shared(x)
        inner = F.silu(self.norm1(self.conv1(shared)[0]))
        inner = F.silu(self.norm2(_each_size(self.conv2, inner, grids)))
        out = self.norm3(self.conv3(self._gated(inner, grids))[0])
        if self.shortcut is not None and self.shortcut_norm is not None:
            projected = gather_from_tensor_model_parallel_region(self.shortcut(shared)[0], group=self.tp_group)
            x = self.shortcut_norm(projected[..., : self.width])
        return F.silu(out + x)

    def _gated(self, x: Tensor, grids: Sequence[Grid]) -> Tensor:
        """Return each channel of an image times a gate, which an MLP makes of the means of all channels (SENet)."""
        means = torch.cat([images.mean((1, 2)) for images in images_of(x[:, 0], grids)])
        squeezed = F.silu(self.squeeze(means[:, None])[0])
        gates, start, found = torch.sigmoid(self.excite(self.shared(squeezed))[0])[:, 0], 0, []
        for images in images_of(x[:, 0], grids):
            found.append(images * gates[start : start + len(images), None, None])
            start += len(images)
        return _joined(found)


def _each_size(function: Callable[[Tensor], Tensor], x: Tensor, grids: Sequence[Grid]) -> Tensor:
    """Apply a function of images [images, rows, columns, c] to [P, 1, c], consecutive images of one size at once."""
    return _joined([function(images) for images in images_of(x[:, 0], grids)])


def _joined(groups: Sequence[Tensor]) -> Tensor:
    """[images, rows, columns, c] of each group → [P, 1, c]."""
    found = [images.flatten(0, 2) for images in groups]
    return (torch.cat(found) if len(found) > 1 else found[0])[:, None]


class CAbstractor(ConnectorModule):
    """Learned positions [side², Hv], blocks, average pooling, blocks, and an MLP."""

    def __init__(self, builder: LayerBuilder) -> None:
        super().__init__(builder)
        model, own = self.model, C_ABSTRACTOR.own(self.model)
        self.table_side, self.side = C_ABSTRACTOR.table(model), own.side
        places, width = self.table_side**2, model.vision.hidden_size
        self.positions = nn.Parameter(torch.empty(places, width, dtype=self.config.params_dtype))
        of_name = C_ABSTRACTOR.blocks(model)

        def blocks(stage: str) -> Part:
            made = (
                Block(self.config, self.tp_group, of_name[f"{stage}.{n}"], own.norm_epsilon) for n in range(own.depth)
            )
            return Part(self.config, self.tp_group, list(made))

        self.before, self.after = blocks("before"), blocks("after")
        self.mlp = Mlp(self.config, self.tp_group, C_ABSTRACTOR.mlp(model), F.silu)

    def features(self, patches: Tensor, grids: tuple[Grid, ...], tile_groups: Sequence[TileGroup]) -> Tensor:
        tables = {
            grid: resized_table(self.positions, self.table_side, grid, "bicubic") for grid in dict.fromkeys(grids)
        }
        x = (patches + torch.cat([tables[grid] for grid in grids]))[:, None]
        for block in self.before.children():
            x = block(x, grids)
        pooled = ((self.side, self.side),) * len(grids)
        x = _each_size(self._pooled, x, grids)
        for block in self.after.children():
            x = block(x, pooled)
        out: Tensor = self.mlp(x)
        return out

    def _pooled(self, images: Tensor) -> Tensor:
        return F.adaptive_avg_pool2d(images.permute(0, 3, 1, 2), self.side).permute(0, 2, 3, 1)
