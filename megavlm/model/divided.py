"""Layers whose channels tensor-parallel ranks divide: a layer norm over the channels of all ranks, and a convolution of
each channel by itself.

Legend: C channels of the model, c those that each rank holds, padding included, of which the first n are the model's.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor, nn

from megavlm.config.tensor_split import share_of


class _Divided(nn.Module):
    """A layer whose parameters are sharded over tensor-parallel ranks along their first axis."""

    def __init__(self, config: TransformerConfig, channels: int, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.channels, self.tp_group, self.dtype = channels, group, config.params_dtype
        self.held = share_of(channels, group.size())

    def parameter(self, *shape: int) -> nn.Parameter:
        """Return a parameter of a rank's channels, which counts in norms on each rank."""
        param = nn.Parameter(torch.zeros(self.held, *shape, dtype=self.dtype))
        set_tensor_model_parallel_attributes(param, True, 0, 1)
        return param

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> Any:
        """Return how ranks divide the parameters, for checkpoints and initial weights."""
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            dict.fromkeys(("weight", "bias"), 0),
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )


class DividedLayerNorm(_Divided):
    """Layer norm over all channels of all ranks: [..., c] → same shape. Padding holds zeros and stays out of it."""

    def __init__(self, config: TransformerConfig, channels: int, epsilon: float, group: dist.ProcessGroup) -> None:
        super().__init__(config, channels, group)
        self.epsilon = epsilon
        self.weight, self.bias = self.parameter(), self.parameter()

    def forward(self, x: Tensor) -> Tensor:
        if self.tp_group.size() == 1:
            return F.layer_norm(x, (self.channels,), self.weight, self.bias, self.epsilon)
        out: Tensor = _LayerNorm.apply(x, self.weight, self.bias, self)
        return out


class _LayerNorm(torch.autograd.Function):
    """x̂·w + b, with x̂ = (x − μ)/σ over C channels, n of which are here. It keeps what torch's keeps: x, μ and 1/σ."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, layer: DividedLayerNorm) -> Tensor:
        group = layer.tp_group
        each = [min(layer.held, layer.channels - rank * layer.held) for rank in range(group.size())]
        ctx.group, ctx.channels, ctx.own = group, layer.channels, each[group.rank()]
        own = x[..., : ctx.own].float()
        variances, means = torch.var_mean(own, -1, correction=0, keepdim=True)
        moments = torch.stack([means, variances])
        gathered = moments.new_empty(group.size() * len(moments), *moments.shape[1:])
        dist.all_gather_into_tensor(gathered, moments, group=group)
        all_moments = gathered.unflatten(0, (-1, len(moments)))
        # Of ranks r with n_r channels: μ = Σ n_r μ_r / C and σ² = Σ n_r (σ_r² + (μ_r − μ)²) / C (Chan et al. 1979).
        share = all_moments.new_tensor(each).view(-1, *[1] * x.dim()) / layer.channels
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
    """A 3 × 3 convolution of each channel by itself, with zeros around the image: [images, rows, columns, c] → same."""

    def __init__(self, config: TransformerConfig, channels: int, group: dist.ProcessGroup) -> None:
        super().__init__(config, channels, group)
        self.weight = self.parameter(1, 3, 3)

    def forward(self, images: Tensor) -> Tensor:
        out = F.conv2d(images.permute(0, 3, 1, 2), self.weight, padding=1, groups=self.held)
        return out.permute(0, 2, 3, 1)
