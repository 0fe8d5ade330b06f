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
    """What a checkpoint says of the histories in it; None where there are none. Others do not fit each other."""
    if config.precision.fp8 == "none" or config.precision.fp8_recipe != "delayed":
        return None
    return {"format": config.precision.fp8, "amax_history_len": config.precision.fp8_amax_history_len}


def histories(chunk: nn.Module) -> dict[str, Tensor]:
    """The tensors themselves by name, of every module that has run in FP8 or was prepared."""
    found = {}
    for name, module in _fp8_modules(chunk):
        for side, word in _SIDES.items():
            for leaf in _TENSORS if side in module.fp8_meta else ():
                found[f"{name}.fp8.{word}.{leaf}"] = getattr(module.fp8_meta[side], leaf)
    return found


def sharded_histories(chunk: nn.Module, *, replica: int) -> dict[str, ShardedTensor]:
    """For megatron-core's checkpoints; replica 0 writes."""
    return {
        name: ShardedTensor.from_rank_offsets(name, tensor, replica_id=replica)
        for name, tensor in histories(chunk).items()
    }


def prepare(chunk: nn.Module, *, runs_in_fp8: Callable[[str], bool], recipe: Callable[[], Any]) -> None:
    """Make the tensors that Transformer Engine would make in the first pass, so that there is something to fill."""
    for name, module in _fp8_modules(chunk):
        if runs_in_fp8(name) and "scaling_fwd" not in module.fp8_meta:
            module.fp8_meta.setdefault("num_gemms", 1)
            module.fp8_meta["recipe"] = recipe()
            module.init_fp8_meta_tensors(module.fp8_meta["recipe"])


def restore(chunk: nn.Module, loaded: Mapping[str, Tensor]) -> None:
    """In place: Transformer Engine's quantizers hold these very tensors."""
    for name, tensor in histories(chunk).items():
        tensor.copy_(loaded[name])


def _fp8_modules(chunk: nn.Module) -> Iterator[tuple[str, Any]]:
    """Linear layers that have FP8 state; attention, which runs in high precision, has some of no use."""
    for name, module in getattr(chunk, "module", chunk).named_modules():  # some wrap a chunk to shard it
        if hasattr(module, "fp8_meta") and hasattr(module, "weight"):
            yield name, module
