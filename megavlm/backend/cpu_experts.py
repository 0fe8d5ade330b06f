"""What megatron-core's mixture of experts lacks on a CPU: numbers of tokens as lists, and uneven gathers by gloo."""

from __future__ import annotations

import importlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def install() -> None:
    """Idempotent; imports megatron-core."""
    dispatcher: Any = importlib.import_module("megatron.core.transformer.moe.token_dispatcher")
    dispatcher.maybe_move_tensor_to_cpu = _on_host
    mappings: Any = importlib.import_module("megatron.core.tensor_parallel.mappings")
    if mappings._gather_along_first_dim is not _gather:
        _Even.gather, _Even.scatter = mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim
        mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim = _gather, _scatter


class _Even:
    """megatron-core's own functions."""

    gather: Any
    scatter: Any


def _on_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Return a tensor as numpy where that is wanted: megatron-core leaves what never was on a device a tensor."""
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def _gather(input_: Tensor, group: Any, output_split_sizes: Any = None, use_global_buffer: bool = False) -> Tensor:
    """Gather along the first dimension. gloo gathers equal parts only: uneven ones are padded to the longest."""
    if output_split_sizes is None or len(set(output_split_sizes)) == 1:
        gathered: Tensor = _Even.gather(input_, group, None, use_global_buffer)
        return gathered
    longest = max(output_split_sizes)
    padded = input_.new_zeros(longest, *input_.shape[1:])
    padded[: len(input_)] = input_
    whole = input_.new_empty(group.size() * longest, *input_.shape[1:])
    dist.all_gather_into_tensor(whole, padded, group=group)
    return torch.cat([part[:size] for part, size in zip(whole.split(longest), output_split_sizes, strict=True)])


def _scatter(input_: Tensor, group: Any, input_split_sizes: Any = None, use_global_buffer: bool = False) -> Tensor:
    """Sum over ranks and scatter along the first dimension, padded as above."""
    if input_split_sizes is None or len(set(input_split_sizes)) == 1:
        scattered: Tensor = _Even.scatter(input_, group, None, use_global_buffer)
        return scattered
    longest = max(input_split_sizes)
    whole = input_.new_zeros(group.size(), longest, *input_.shape[1:])
    for part, rows in zip(whole, input_.split(list(input_split_sizes)), strict=True):
        part[: len(rows)] = rows
    own = input_.new_empty(longest, *input_.shape[1:])
    dist.reduce_scatter_tensor(own, whole.flatten(0, 1), group=group)
    return own[: input_split_sizes[group.rank()]].contiguous()
