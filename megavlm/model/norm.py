"""Norms as megatron-core's layer specs build them, with sequence parallelism, and additions of residual branches.

Under sequence parallelism each tensor-parallel rank normalises its own part of the sequence, so the gradient of
the (replicated) weight is a partial sum: `param.sequence_parallel` makes megatron-core sum them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn


class Norm(nn.Module):
    """A norm over the last dimension, by default of the kind that the config names: [..., hidden_size] → same shape.

    A LayerNorm has a bias unless `bias` is False; an RMS norm has no weights if `weighted` is False.
    """

    weight: nn.Parameter | None

    def __init__(
        self,
        config: TransformerConfig,
        hidden_size: int,
        eps: float = 1e-5,
        *,
        normalization: str | None = None,
        bias: bool = True,
        weighted: bool = True,
        **_: Any,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.offset = int(config.layernorm_zero_centered_gamma)
        self.shape = (hidden_size,)
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype)) if weighted else None
        self.bias = None
        self.centres = (normalization or config.normalization) == "LayerNorm"
        if self.centres and bias:
            self.bias = nn.Parameter(torch.zeros(hidden_size, dtype=config.params_dtype))
        for param in self.parameters():
            param.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        if self.weight is None:
            return F.rms_norm(x, self.shape, eps=self.eps)
        if self.centres:
            weight = self.offset + self.weight if self.offset else self.weight
            return F.layer_norm(x, self.shape, weight, self.bias, self.eps)
        return rms_norm(x, self.weight, self.eps, offset=self.offset)


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, offset: int) -> Tensor:
    """Return x / rms(x) · (offset + weight) over the last dimension.

    With an offset the product is computed in float32: in bf16 the sum would round a weight near 0 away.
    """
    if not offset:
        return F.rms_norm(x, weight.shape, weight, eps)
    return F.rms_norm(x.float(), weight.shape, offset + weight.float(), eps).type_as(x)


class FullRMSNorm(nn.Module):
    """RMS norm over all query (or key) heads together (InternViT-6B): [..., local heads, width] → same shape.

    mean(x²) runs over the heads of all tensor-parallel ranks. Every rank holds the whole weight and uses its slice
    of it; the gradients of the slices add up over ranks like those of any replicated weight. Padding
    heads hold zeros, so they add nothing to the sum, and the mean divides by the real heads only.
    """

    def __init__(
        self,
        config: TransformerConfig,
        hidden_size: int,
        eps: float = 1e-6,
        *,
        real_heads: int,
        tp_group: dist.ProcessGroup,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.real_width = real_heads * hidden_size
        self.tp_group = tp_group
        self.weight = nn.Parameter(torch.ones(real_heads * hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        heads, width = x.shape[-2:]
        local = x.float().reshape(*x.shape[:-2], heads * width)
        squares = local.square().sum(-1, keepdim=True)
        # Summed forward and backward, as every rank's loss depends on every rank's addend.
        squares = reduce_from_tensor_model_parallel_region(squares, group=self.tp_group)
        squares = copy_to_tensor_model_parallel_region(squares, group=self.tp_group)
        start = self.tp_group.rank() * heads * width
        weight = self.weight[start : start + heads * width]
        weight = F.pad(weight, (0, heads * width - weight.numel()))
        out = (local * torch.rsqrt(squares / self.real_width + self.eps)).type_as(x) * weight
        return out.view_as(x)


class PostNorm(nn.Module):
    """residual + dropout(norm(branch)), with a norm after attention and one after the MLP (Gemma 2 and 3)."""

    def __init__(self, config: TransformerConfig, norm: Any) -> None:
        super().__init__()
        self.norm = build_module(norm, config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon)

    def forward(self, training: bool, fused: bool) -> Callable[..., Tensor]:
        """Return the function that adds the branch to the residual; megatron-core calls it next."""

        def add(branch: tuple[Tensor, Tensor | None], residual: Tensor, dropout: float) -> Tensor:
            x, bias = branch
            return residual + F.dropout(self.norm(x if bias is None else x + bias), p=dropout, training=training)

        return add


class LayerScale(nn.Module):
    """residual + dropout(scale · branch), with a learned scale per channel (Touvron et al. 2021; InternViT)."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(config.hidden_size, dtype=config.params_dtype))
        self.scale.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, training: bool, fused: bool) -> Callable[..., Tensor]:
        """Return the function that adds the branch to the residual; megatron-core calls it next."""

        def add(branch: tuple[Tensor, Tensor | None], residual: Tensor, dropout: float) -> Tensor:
            x, bias = branch
            x = (x if bias is None else x + bias) * self.scale
            return residual + F.dropout(x, p=dropout, training=training)

        return add


class ScaledLayer(TransformerLayer):
    """A transformer layer whose output is multiplied by a given number, which is not trained (Gemma 4)."""

    layer_scalar: Tensor  # [1]

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.register_buffer("layer_scalar", torch.ones(1, dtype=config.params_dtype))

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        hidden, context = super().forward(*args, **kwargs)
        return hidden * self.layer_scalar, context


class ParallelLayer(TransformerLayer):
    """x + attention(norm(x)) + MLP(norm(x)), with one norm (Wang and Komatsuzaki 2021; Cohere): [S(/TP), B, H]."""

    def forward(self, hidden_states: Tensor, **given: Any) -> tuple[Tensor, None]:
        normed = self.input_layernorm(hidden_states)
        attended = self.self_attention(normed, **given)
        expanded = self.mlp(normed)
        with self.bias_dropout_add_exec_handler():
            hidden = self.self_attn_bda(self.training, False)(attended, hidden_states, self.hidden_dropout)
            return self.mlp_bda(self.training, False)(expanded, hidden, self.hidden_dropout), None
