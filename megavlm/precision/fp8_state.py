"""FP8 in initialisation and checkpoints: weights that are kept in FP8, and the amax histories of delayed scaling.

With `--fp8-param-gather` the distributed optimizer gathers weights in FP8. Transformer Engine creates the linear layers
of an FP8 layer with weights of its own tensor type, which looks like a bf16 tensor and holds FP8 numbers and a scale.
Only megatron-core's buffers and optimizer handle that type: code that fills, saves or loads weights gets plain tensors.
The authoritative values are the fp32 master weights. Frozen weights have no master weights, are never gathered, and
stay as they are.

Checkpoints hold the state of delayed scaling as plain tensors, under names that are independent of the layout.
Transformer Engine keeps it in each module's extra state, a pickle, which a checkpoint must not hold. A resumed run
needs only the amax histories and the scales. They are reduced over tensor- and data-parallel ranks, so every rank of a
layer holds the same values, and a run with any layout can read them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from megatron.core import fp8_utils
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from torch import Tensor, nn

from megavlm.arch.layers import keeps_fp8
from megavlm.config.schema import Config
from megavlm.parallel.shards import ParamShard


def building(name: str, layer_config: Any, config: Config) -> AbstractContextManager[Any]:
    """Return the context for building layer `name`; it creates weights in FP8 if the layer keeps FP8 weights."""
    return fp8_utils.get_fp8_context(layer_config, is_init=True) if keeps_fp8(name, config) else nullcontext()


@contextmanager
def plain_weights(chunks: Iterable[nn.Module]) -> Iterator[None]:
    """Return a context in which model chunks have plain tensors in place of FP8 weights, so that they can be filled.

    Use it before data parallelism wraps the chunks. On exit the tensors are rounded to FP8; their values before
    rounding are kept on the host until the master weights have been initialised from them.
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
    """Round `plain` into an FP8 parameter; keep `plain` on the host as the initial value of the master weights."""
    if hasattr(param, "clear_high_precision_init_val"):
        param.clear_high_precision_init_val()
    with torch.no_grad():
        param.copy_(plain)
    kept = [plain.cpu()]
    param.get_high_precision_init_val = lambda: kept[0]
    param.clear_high_precision_init_val = kept.clear  # several may call it


def entries_to_save(entries: Mapping[str, Any], shards: Iterable[ParamShard]) -> dict[str, Any]:
    """Return a chunk's checkpoint entries, with this rank's shard of master weights in place of FP8 parameters."""
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
    """Return a chunk's entries for loading a checkpoint, with empty plain tensors in place of FP8 parameters."""
    return {
        key: replace(entry, data=torch.empty(entry.data.shape, dtype=entry.data.dtype, device=entry.data.device))
        if fp8_utils.is_float8tensor(entry.data)
        else entry
        for key, entry in entries.items()
    }


_SIDES = {"scaling_fwd": "forward", "scaling_bwd": "backward"}
_TENSORS = ("amax_history", "scale")


def history_of(config: Config) -> dict[str, Any] | None:
    """Return the format of a run's amax histories in checkpoints; None without delayed scaling.

    Histories of different formats are not compatible.
    """
    if config.precision.fp8 == "none" or config.precision.fp8_recipe != "delayed":
        return None
    return {"format": config.precision.fp8, "amax_history_len": config.precision.fp8_amax_history_len}


def histories(chunk: nn.Module) -> dict[str, Tensor]:
    """Return amax histories and scales, by name, of every module that has run in FP8 or was prepared."""
    found = {}
    for name, module in _fp8_modules(chunk):
        for side, word in _SIDES.items():
            for leaf in _TENSORS if hasattr(module.fp8_meta.get(side), "amax_history") else ():
                found[f"{name}.fp8.{word}.{leaf}"] = getattr(module.fp8_meta[side], leaf)
    return found


def sharded_histories(chunk: nn.Module, *, replica: int) -> dict[str, ShardedTensor]:
    """Return the histories and scales as entries of megatron-core's checkpoints; replica 0 writes them."""
    return {
        name: ShardedTensor.from_rank_offsets(name, tensor, replica_id=replica)
        for name, tensor in histories(chunk).items()
    }


def prepare(chunk: nn.Module, *, runs_in_fp8: Callable[[str], bool], recipe: Callable[[], Any]) -> None:
    """Create the FP8 state that Transformer Engine creates in the first pass, so that a checkpoint can be loaded."""
    for name, module in _fp8_modules(chunk):
        if runs_in_fp8(name) and "scaling_fwd" not in module.fp8_meta:
            module.fp8_meta.setdefault("num_gemms", 1)
            module.fp8_meta["recipe"] = recipe()
            module.init_fp8_meta_tensors(module.fp8_meta["recipe"])


def restore(chunk: nn.Module, loaded: Mapping[str, Tensor]) -> None:
    """Copy loaded histories and scales in place, because Transformer Engine's quantizers hold these tensors."""
    for name, tensor in histories(chunk).items():
        tensor.copy_(loaded[name])


def _fp8_modules(chunk: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield name and module of layers with FP8 state and a weight; core attention, in high precision, is left out."""
    for name, module in getattr(chunk, "module", chunk).named_modules():  # some wrap a chunk to shard it
        if hasattr(module, "fp8_meta") and hasattr(module, "weight"):
            yield name, module
