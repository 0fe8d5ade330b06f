"""DeepStack (Meng et al. 2024; Qwen3-VL): features of inner vision layers, added to the first language layers.

Merger j turns what vision layer d_j puts out into features [F, 1, H], which are added to the hidden states of the image
tokens after language layer j. Between the two they travel with the hidden states, past every cut of the pipeline.

Legend: F image features, S positions, B samples, H width of the language model.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region
from torch import Tensor


def pack(hidden: Tensor, carried: Sequence[Tensor]) -> Tensor:
    """One tensor for the next pipeline chunk: `hidden` itself where nothing is carried, else all values, [N, 1, 1].

    Three dimensions are what megatron-core's transfers announce.
    """
    if not carried:
        return hidden
    return torch.cat([hidden.flatten(), *(tensor.flatten() for tensor in carried)])[:, None, None]


def unpack(
    packed: Tensor, *, hidden: tuple[int, int], carried: Sequence[tuple[int, ...]]
) -> tuple[Tensor, list[Tensor]]:
    """Return what `pack` joined: hidden states of shape [any, *hidden], and tensors of the given shapes."""
    if not carried:
        return packed, []
    sizes = [prod(shape) for shape in carried]
    first, *rest = packed.flatten().split([packed.numel() - sum(sizes), *sizes])
    return first.view(-1, *hidden), [part.view(shape) for part, shape in zip(rest, carried, strict=True)]


def add_features(
    hidden: Tensor, features: Tensor, positions: Tensor, *, length: int, sequence_group: dist.ProcessGroup | None
) -> Tensor:
    """Add features to the hidden states of their tokens: [S(/TP), B, H], [F, 1, H] → [S(/TP), B, H].

    Args:
        positions: [F] index into the flattened [B·S] tokens; empty for a blank image's feature, which is added nowhere
            but stays in the graph, so that its merger gets a gradient of zero.
        length: S.
        sequence_group: ranks over which S is sharded, each of which adds what falls into its part. Backward sums the
            features' gradients over them, as every rank holds all features.
    """
    features = features[: positions.numel()]
    sample, position = positions // length, positions % length
    if sequence_group is not None:
        features = copy_to_tensor_model_parallel_region(features, group=sequence_group)
        position = position - sequence_group.rank() * hidden.shape[0]
        mine = (position >= 0) & (position < hidden.shape[0])
        features = features * mine[:, None, None]  # others add zero, to any place
        position = position.clamp(0, hidden.shape[0] - 1)
    flat = hidden.flatten(0, 1).index_add(0, position * hidden.shape[1] + sample, features[:, 0].to(hidden.dtype))
    return flat.view_as(hidden)
