"""Weights that are kept in FP8, and gathered so by the distributed optimizer (`--fp8-param-gather`).

Transformer Engine makes the linear layers of an FP8 layer with weights of its own type, which looks like a bf16 tensor
and holds FP8 numbers and a scale; megatron-core's buffers and optimizer know that type. Nothing else here should: who
fills, saves or loads weights meets plain tensors. The truth is in the fp32 master weights. Weights that are not trained
have none, are never gathered, and stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from megatron.core import fp8_utils
from torch import Tensor, nn

from megavlm.arch.layers import keeps_fp8
from megavlm.config.schema import Config
from megavlm.parallel.shards import ParamShard


def building(name: str, layer_config: Any, config: Config) -> AbstractContextManager[Any]:
    """Return the context in which layer `name` is built: weights in FP8 if it keeps them so."""
    return fp8_utils.get_fp8_context(layer_config, is_init=True) if keeps_fp8(name, config) else nullcontext()


@contextmanager
def plain_weights(chunks: Iterable[nn.Module]) -> Iterator[None]:
    """In it, chunks have plain tensors in place of weights in FP8, to be filled before data parallelism wraps them.

    At its end these are rounded, and what they were is kept until master weights have begun with it.
    """
    places = [
        (module, name, param)
        for chunk in chunks
        for module in chunk.modules()
        for name, param in module.named_parameters(recurse=False)
        if fp8_utils.is_float8tensor(param)
    ]
    for module, name, param in places:
        plain = nn.Parameter(fp8_utils.dequantize_fp8_tensor(param.detach()), requires_grad=param.requires_grad)
        vars(plain).update(_marks(param))
        setattr(module, name, plain)
    yield
    for module, name, param in places:
        _begin_with(param, getattr(module, name).detach())
        setattr(module, name, param)


def _marks(param: Tensor) -> dict[str, Any]:
    """Return the attributes that tensor parallelism has set on a parameter."""
    noted = ("tensor_model_parallel", "partition_dim", "partition_stride", "sequence_parallel", "allreduce")
    return {name: getattr(param, name) for name in noted if hasattr(param, name)}


def _begin_with(param: Any, plain: Tensor) -> None:
    """Round a parameter; keep its values before rounding on the host, from which the master weights start."""
    if hasattr(param, "clear_high_precision_init_val"):
        param.clear_high_precision_init_val()
    with torch.no_grad():
        param.copy_(plain)
    kept = [plain.cpu()]
    param.get_high_precision_init_val = lambda: kept[0]
    param.clear_high_precision_init_val = kept.clear  # several may call it


def entries_to_save(entries: Mapping[str, Any], shards: Iterable[ParamShard]) -> dict[str, Any]:
    """Return a chunk's checkpoint entries, with this rank's part of master weights in place of parameters in FP8."""
    in_fp8 = {id(entry.data): key for key, entry in entries.items() if fp8_utils.is_float8tensor(entry.data)}
    plain = {key: entry for key, entry in entries.items() if id(entry.data) not in in_fp8}
    masters = {
        f"{in_fp8[id(each.param)]}/{number}": part
        for each in shards
        if id(each.param) in in_fp8
        for number, part in enumerate(each.layout.parts(each.state["param"].to(each.param.dtype)))
    }
    return plain | masters


def entries_to_load(entries: Mapping[str, Any]) -> dict[str, Any]:
    """Return a chunk's entries to fill from a checkpoint; parameters in FP8 are replaced by plain tensors."""
    return {
        key: replace(entry, data=torch.empty(entry.data.shape, dtype=entry.data.dtype, device=entry.data.device))
        if fp8_utils.is_float8tensor(entry.data)
        else entry
        for key, entry in entries.items()
    }
