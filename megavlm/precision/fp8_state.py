"""Delayed scaling's memory in checkpoints: plain tensors under names that know no layout.

Transformer Engine keeps it in each module's extra state, a pickle, which a checkpoint must not hold. Of that state, the
largest values of past passes and the scales that follow from them are what a resumed run needs. They are reduced over
tensor- and data-parallel ranks, so every rank of a layer holds the same, and any layout may read them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from megatron.core.dist_checkpointing.mapping import ShardedTensor
from torch import Tensor, nn

from megavlm.config.schema import Config

_SIDES = {"scaling_fwd": "forward", "scaling_bwd": "backward"}
_TENSORS = ("amax_history", "scale")


def history_of(config: Config) -> dict[str, Any] | None:
    """Return the format of the amax histories in a checkpoint, None without any. Formats are not compatible."""
    if config.precision.fp8 == "none" or config.precision.fp8_recipe != "delayed":
        return None
    return {"format": config.precision.fp8, "amax_history_len": config.precision.fp8_amax_history_len}


def histories(chunk: nn.Module) -> dict[str, Tensor]:
    """Return the history tensors by name, of every module that has run in FP8 or was prepared."""
    found = {}
    for name, module in _fp8_modules(chunk):
        for side, word in _SIDES.items():
            for leaf in _TENSORS if hasattr(module.fp8_meta.get(side), "amax_history") else ():
                found[f"{name}.fp8.{word}.{leaf}"] = getattr(module.fp8_meta[side], leaf)
    return found


def sharded_histories(chunk: nn.Module, *, replica: int) -> dict[str, ShardedTensor]:
    """Return the histories as entries of megatron-core's checkpoints; replica 0 writes them."""
    return {
        name: ShardedTensor.from_rank_offsets(name, tensor, replica_id=replica)
        for name, tensor in histories(chunk).items()
    }


def prepare(chunk: nn.Module, *, runs_in_fp8: Callable[[str], bool], recipe: Callable[[], Any]) -> None:
    """Create the tensors that Transformer Engine would create in the first pass, so that a checkpoint can fill them."""
    for name, module in _fp8_modules(chunk):
        if runs_in_fp8(name) and "scaling_fwd" not in module.fp8_meta:
            module.fp8_meta.setdefault("num_gemms", 1)
            module.fp8_meta["recipe"] = recipe()
            module.init_fp8_meta_tensors(module.fp8_meta["recipe"])


def restore(chunk: nn.Module, loaded: Mapping[str, Tensor]) -> None:
    """Fill the histories in place, because Transformer Engine's quantizers hold these tensors."""
    for name, tensor in histories(chunk).items():
        tensor.copy_(loaded[name])


def _fp8_modules(chunk: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the linear layers that have FP8 state; that of attention, which runs in high precision, is not used."""
    for name, module in getattr(chunk, "module", chunk).named_modules():  # some wrap a chunk to shard it
        if hasattr(module, "fp8_meta") and hasattr(module, "weight"):
            yield name, module
