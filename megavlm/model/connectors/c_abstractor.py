"""Honeybee's C-Abstractor, tensor-parallel (`megavlm/arch/connectors/c_abstractor.py`).

Channels are sharded over tensor-parallel ranks, also in the layer norms over all channels and in the depthwise
convolution. Legend: P positions of all images, C channels of the model, c channels of a rank with padding, the first n
of which are the model's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor, nn

from megavlm.arch.connectors.c_abstractor import C_ABSTRACTOR, ConvBlock
from megavlm.arch.image_tokens import Grid, TileGroup
from megavlm.arch.tensor_split import share_of
from megavlm.model.connector import ConnectorModule
from megavlm.model.norm import Norm
from megavlm.model.resampler import ResamplerMlp, ResamplerPart
from megavlm.model.specs import LayerBuilder
from megavlm.model.vision_ops import images_of, resized_table


class _Divided(nn.Module):
    """A layer whose parameters are sharded over tensor-parallel ranks along their first axis."""

    def __init__(self, config: TransformerConfig, channels: int, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.channels, self.tp_group, self.dtype = channels, group, config.params_dtype
        self.held = share_of(channels, group.size())

    def parameter(self, *shape: int) -> nn.Parameter:
        """Return a parameter for this rank's channels, marked as sharded for gradient norms."""
        param = nn.Parameter(torch.zeros(self.held, *shape, dtype=self.dtype))
        set_tensor_model_parallel_attributes(param, True, 0, 1)
        return param

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> Any:
        """Return the sharded state dict, for checkpoints and initial weights."""
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            dict.fromkeys(("weight", "bias"), 0),
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )


class DividedLayerNorm(_Divided):
    """Layer norm over the channels of all ranks: [..., c] → same shape. Padding channels are zero and not counted."""

    def __init__(self, config: TransformerConfig, channels: int, epsilon: float, group: dist.ProcessGroup) -> None:
        super().__init__(config, channels, group)
        self.epsilon = epsilon
        self.weight, self.bias = self.parameter(), self.parameter()

    def forward(self, x: Tensor) -> Tensor:
        if self.tp_group.size() == 1:
            return F.layer_norm(x, (self.channels,), self.weight, self.bias, self.epsilon)
        return _LayerNorm.apply(x, self.weight, self.bias, self)


class _LayerNorm(torch.autograd.Function):
    """x̂·w + b with x̂ = (x − μ)/σ over C channels, n of them on this rank. It saves x, μ and 1/σ, like torch's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, layer: DividedLayerNorm) -> Tensor:
        group = layer.tp_group
        counts = [min(layer.held, layer.channels - rank * layer.held) for rank in range(group.size())]
        ctx.group, ctx.channels, ctx.own = group, layer.channels, counts[group.rank()]
        own = x[..., : ctx.own].float()
        variances, means = torch.var_mean(own, -1, correction=0, keepdim=True)
        moments = torch.stack([means, variances])
        gathered = moments.new_empty(group.size() * len(moments), *moments.shape[1:])
        dist.all_gather_into_tensor(gathered, moments, group=group)
        all_moments = gathered.unflatten(0, (-1, len(moments)))
        # Of ranks r with n_r channels: μ = Σ n_r μ_r / C and σ² = Σ n_r (σ_r² + (μ_r − μ)²) / C (Chan et al. 1979).
        share = all_moments.new_tensor(counts).view(-1, *[1] * x.dim()) / layer.channels
        mean = (share * all_moments[:, 0]).sum(0)
        variance = (share * (all_moments[:, 1] + (all_moments[:, 0] - mean).square())).sum(0)
        scale = torch.rsqrt(variance + layer.epsilon)
        ctx.save_for_backward(x, mean, scale, weight)
        return ((x.float() - mean) * scale * weight + bias).type_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        x, mean, scale, weight = ctx.saved_tensors
        normed, grad = (x.float() - mean) * scale, grad.float()
        # ∂L/∂x = (g − mean(g) − x̂·mean(g·x̂))/σ with g = w·∂L/∂y and means over all C channels. Padding has g = 0.
        scaled = grad * weight
        sums = torch.stack([scaled.sum(-1, keepdim=True), (scaled * normed).sum(-1, keepdim=True)])
        dist.all_reduce(sums, group=ctx.group)
        means = sums / ctx.channels
        toward = (scaled - means[0] - normed * means[1]) * scale
        toward[..., ctx.own :] = 0
        rows = tuple(range(grad.dim() - 1))
        of_weight, of_bias = (grad * normed).sum(rows), grad.sum(rows)
        return toward.type_as(x), of_weight.type_as(weight), of_bias.type_as(weight), None


class DividedConvolution(_Divided):
    """A depthwise 3 × 3 convolution with zero padding: [images, rows, columns, c] → same shape."""

    def __init__(self, config: TransformerConfig, channels: int, group: dist.ProcessGroup) -> None:
        super().__init__(config, channels, group)
        self.weight = self.parameter(1, 3, 3)

    def forward(self, images: Tensor) -> Tensor:
        out = F.conv2d(images.permute(0, 3, 1, 2), self.weight, padding=1, groups=self.held)
        return out.permute(0, 2, 3, 1)


class CAbstractorBlock(ResamplerPart):
    """silu(x + norm(conv3(gated(silu(norm(conv2(silu(norm(conv1(x)))))))))), channels sharded from conv1 to conv3."""

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
        """Return [P, 1, width] for [P, 1, inputs], the row-major positions of images with these grids."""
        shared = self.shared(x)
        inner = F.silu(self.norm1(self.conv1(shared)[0]))
        inner = F.silu(self.norm2(_each_size(self.conv2, inner, grids)))
        out = self.norm3(self.conv3(self._gated(inner, grids))[0])
        if self.shortcut is not None and self.shortcut_norm is not None:
            projected = gather_from_tensor_model_parallel_region(self.shortcut(shared)[0], group=self.tp_group)
            x = self.shortcut_norm(projected[..., : self.width])
        return F.silu(out + x)

    def _gated(self, x: Tensor, grids: Sequence[Grid]) -> Tensor:
        """Return channels times gates, which an MLP computes from the means of all channels of an image (SENet)."""
        means = torch.cat([images.mean((1, 2)) for images in images_of(x[:, 0], grids)])
        squeezed = F.silu(self.squeeze(means[:, None])[0])
        gates, start, outputs = torch.sigmoid(self.excite(self.shared(squeezed))[0])[:, 0], 0, []
        for images in images_of(x[:, 0], grids):
            outputs.append(images * gates[start : start + len(images), None, None])
            start += len(images)
        return _joined(outputs)


def _each_size(function: Callable[[Tensor], Tensor], x: Tensor, grids: Sequence[Grid]) -> Tensor:
    """Apply a function of images [images, rows, columns, c] to [P, 1, c], to consecutive images of one size at once."""
    return _joined([function(images) for images in images_of(x[:, 0], grids)])


def _joined(groups: Sequence[Tensor]) -> Tensor:
    """Return [P, 1, c] from groups of [images, rows, columns, c]."""
    flat = [images.flatten(0, 2) for images in groups]
    return (torch.cat(flat) if len(flat) > 1 else flat[0])[:, None]


class CAbstractor(ConnectorModule):
    """Learned positions [side², Hv], blocks, average pooling, blocks, and an MLP."""

    def __init__(self, builder: LayerBuilder) -> None:
        super().__init__(builder)
        model, own = self.model, C_ABSTRACTOR.own(self.model)
        self.table_side, self.side = C_ABSTRACTOR.table(model), own.side
        places, width = self.table_side**2, model.vision.hidden_size
        self.positions = nn.Parameter(torch.empty(places, width, dtype=self.config.params_dtype))
        of_name = C_ABSTRACTOR.conv_blocks(model)

        def blocks(stage: str) -> ResamplerPart:
            parts = (
                CAbstractorBlock(self.config, self.tp_group, of_name[f"{stage}.{n}"], own.norm_epsilon)
                for n in range(own.depth)
            )
            return ResamplerPart(self.config, self.tp_group, list(parts))

        self.before, self.after = blocks("before"), blocks("after")
        self.mlp = ResamplerMlp(self.config, self.tp_group, C_ABSTRACTOR.mlp(model), F.silu)

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
        return self.mlp(x)

    def _pooled(self, images: Tensor) -> Tensor:
        return F.adaptive_avg_pool2d(images.permute(0, 3, 1, 2), self.side).permute(0, 2, 3, 1)
