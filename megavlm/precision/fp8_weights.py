"""Weights that are kept in FP8, and gathered so by the distributed optimizer (`--fp8-param-gather`).

Transformer Engine makes the linear layers of an FP8 layer with weights of its own type, which looks like a bf16 tensor
and holds FP8 numbers and a scale; megatron-core's buffers and optimizer know that type. Nothing else here should: who
fills, saves or loads weights meets plain tensors. The truth is in the fp32 master weights. Weights that are not trained
have none, are never gathered, and stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import fp8_utils
from torch import Tensor, nn

from megavlm.config.schema import Config
from megavlm.planner.layers import keeps_fp8


def building(name: str, layer_config: Any, config: Config) -> AbstractContextManager[Any]:
    """Around the construction of layer `name`."""
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
    """What tensor parallelism has noted on a parameter."""
    noted = ("tensor_model_parallel", "partition_dim", "partition_stride", "sequence_parallel", "allreduce")
    return {name: getattr(param, name) for name in noted if hasattr(param, name)}


def _begin_with(param: Any, plain: Tensor) -> None:
    """Round a parameter, and let master weights start from the numbers before rounding (on the host, meanwhile)."""
    if hasattr(param, "clear_high_precision_init_val"):
        param.clear_high_precision_init_val()
    with torch.no_grad():
        param.copy_(plain)
    kept = [plain.cpu()]
    param.get_high_precision_init_val = lambda: kept[0]
    param.clear_high_precision_init_val = kept.clear  # several may call it


def true_weights(optimizer: Any, group: dist.ProcessGroup) -> dict[Tensor, Tensor]:
    """Plain tensors for the parameters in FP8, from the master weights that the ranks of `group` share.

    Every rank of the group calls it. A rank adds the part that it has to zeros.
    """
    found = {}
    for part in optimizer.chained_optimizers:
        for param in (param for buffer in getattr(part, "buffers", ()) for param in buffer.params):
            if not fp8_utils.is_float8tensor(param):
                continue
            whole = torch.zeros(param.shape, dtype=param.dtype, device=param.device)
            if getattr(param, "main_param", None) is not None:
                at = part._get_model_param_range_map(param)["param"]
                whole.view(-1)[at.start : at.end] = param.main_param
            dist.all_reduce(whole, group=group)
            found[param] = whole
    return found


def replace_weights(entries: Iterable[Any], weights: Mapping[Tensor, Tensor]) -> None:
    """Let sharded tensors of a checkpoint hold plain tensors where they held parameters in FP8."""
    for entry in entries:
        if fp8_utils.is_float8tensor(entry.data):
            entry.data = weights[entry.data]
