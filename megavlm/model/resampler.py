"""Tensor-parallel layers of resamplers, on whole sequences (torch half of `arch/resampler.py`).

Legend: I images, Q queries of an image, K patches of an image, W width of queries.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.distributed import ProcessGroup

from megavlm.arch.resampler import AttentionBlock, MlpBlock
from megavlm.arch.tensor_split import share_of


class ResamplerPart(MegatronModule):
    """Base class of modules of parallel layers, and a list of such modules, both saved layer by layer."""

    def __init__(self, config: TransformerConfig, group: ProcessGroup, parts: Sequence[MegatronModule] = ()) -> None:
        super().__init__(config=config)
        self.tp_group = group
        for number, part in enumerate(parts):
            self.add_module(str(number), part)

    def shared(self, x: Tensor) -> Tensor:
        """Return `x` as the input of sharded layers: the backward pass sums its gradient over ranks."""
        return copy_to_tensor_model_parallel_region(x, group=self.tp_group)

    def columns(self, inputs: int, outputs: int, *, bias: bool) -> ColumnParallelLinear:
        """Return a linear layer whose outputs are sharded over ranks. Its input must be `shared`."""
        return ColumnParallelLinear(
            inputs,
            outputs * self.tp_group.size(),
            config=self.config,
            init_method=self.config.init_method,
            bias=bias,
            gather_output=False,
            disable_grad_reduce=True,
            tp_group=self.tp_group,
        )

    def rows(self, inputs: int, outputs: int, *, bias: bool) -> RowParallelLinear:
        """Return a linear layer whose inputs are sharded over ranks. Its outputs are summed over the ranks."""
        return RowParallelLinear(
            inputs * self.tp_group.size(),
            outputs,
            config=self.config,
            init_method=self.config.init_method,
            bias=bias,
            input_is_parallel=True,
            skip_bias_add=False,
            is_expert=False,
            tp_group=self.tp_group,
        )


class ResamplerAttention(ResamplerPart):
    """Multi-head attention of each image's queries to the rows of that image."""

    def __init__(self, config: TransformerConfig, group: ProcessGroup, block: AttentionBlock) -> None:
        super().__init__(config, group)
        self.head_width = block.head_width
        wide, narrow = block.local(group.size())
        self.query = self.columns(block.width, wide, bias=block.bias)
        self.key = self.columns(block.context, narrow, bias=block.bias)
        self.value = self.columns(block.context, narrow, bias=block.bias)
        self.output = self.rows(wide, block.width, bias=block.bias)

    def forward(self, queries: Tensor, count: int, *contexts: tuple[Tensor, Sequence[int]]) -> Tensor:
        """Return the attention's output [I·Q, 1, W] for queries [I·Q, 1, W], `count` for each image.

        Each of `contexts` has rows [ΣK, 1, C], the inputs of keys and values, and the number of rows of each image.
        The queries of an image attend to its rows of all contexts. All tensors are `shared`.
        """
        query = self._heads(self.query(queries)[0]).unflatten(0, (-1, count))
        keys = [self._heads(self.key(rows)[0]) for rows, _ in contexts]
        values = [self._heads(self.value(rows)[0]) for rows, _ in contexts]
        # One call computes consecutive images that have the same number of patches.
        sizes, image, outputs = list(zip(*(lengths for _, lengths in contexts), strict=True)), 0, []
        for size, group in groupby(sizes):
            images = len(list(group))
            begins = [sum(lengths[:image]) for _, lengths in contexts]
            outputs.append(
                _attend(
                    query[image : image + images],
                    _of_images(keys, begins, images, size),
                    _of_images(values, begins, images, size),
                )
            )
            image += images
        out = torch.cat(outputs) if len(outputs) > 1 else outputs[0]
        return self.output(out.reshape(-1, 1, out.shape[2] * out.shape[3]))[0]

    def _heads(self, x: Tensor) -> Tensor:
        """Return [rows, heads, D] from [rows, 1, heads · D]."""
        return x.squeeze(1).unflatten(1, (-1, self.head_width))


def _of_images(contexts: Sequence[Tensor], begins: Sequence[int], images: int, sizes: Sequence[int]) -> Tensor:
    """Return [images, K of all contexts, heads, D] from [ΣK, heads, D] of each context."""
    parts = [
        rows[begin : begin + images * size].unflatten(0, (images, size))
        for rows, begin, size in zip(contexts, begins, sizes, strict=True)
    ]
    return torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]


def _attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Return the attention [I, Q, heads, D] of query [I, Q, heads, D] to key and value [I, K, groups, D]."""
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=q.shape[1] != k.shape[1]).transpose(1, 2)


class ResamplerMlp(ResamplerPart):
    """The MLP that an `MlpBlock` describes."""

    def __init__(
        self, config: TransformerConfig, group: ProcessGroup, block: MlpBlock, activation: Callable[[Tensor], Tensor]
    ) -> None:
        super().__init__(config, group)
        self.activation, inner = activation, share_of(block.inner, group.size())
        for name in block.first:
            self.add_module(name, self.columns(block.width, inner, bias=block.bias))
        self.first: Any = [getattr(self, name) for name in block.first]
        self.fc2 = self.rows(inner, block.outputs, bias=block.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = self.shared(x)
        hidden, *others = (layer(x)[0] for layer in self.first)
        hidden = self.activation(hidden)
        return self.fc2(hidden * others[0] if others else hidden)[0]
