"""Find which part of each trained parameter this rank updates, with its fp32 weights and the optimizer's state of it.

The answers do not depend on which of megatron-core's optimizers, or ours, holds a parameter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from megatron.core.optimizer import DistributedOptimizer
from torch import Tensor

from megavlm.optim.fully_sharded import FullyShardedChunk, ShardedOptimizer
from megavlm.parallel.shards import ShardLayout, local_part, shard_layout


def held_state(optimizer: Any) -> Iterator[tuple[Tensor, Mapping[str, Tensor]]]:
    """Yield each trained parameter with its fp32 weights ("param", unless they are the parameter) and moments by name.

    With sharded state they are this rank's part. Moments are missing before the first update.
    """
    for part in optimizer.chained_optimizers:
        if part.is_stub_optimizer:
            continue
        if isinstance(part, DistributedOptimizer):
            for param in part.model_param_gbuf_map:
                yield param, part._get_main_param_and_optimizer_states(param)
            continue
        model = _model_params(part)
        for main in (param for group in part.optimizer.param_groups for param in group["params"]):
            param = model.get(main, main)
            weights = {} if param is main else {"param": main}
            state = part.optimizer.state.get(main, {})
            yield param, weights | {kind: local_part(held) for kind, held in state.items()}


def held_layouts(part: Any, entries: Mapping[int, Any]) -> Iterator[tuple[Tensor, Tensor, ShardLayout]]:
    """Yield the trained parameters of one of megatron-core's optimizers, each with the fp32 weights that this rank
    updates, and their layout.

    `entries` are those of the model's sharded state dict, by the `id` of the parameter that they describe.
    """
    if part.is_stub_optimizer:
        return
    if isinstance(part, ShardedOptimizer):
        for chunk in part.chunks:
            chunk.reshard()
            for name, param in chunk.trained.items():
                yield param, param, chunk.layouts[name]
    elif isinstance(part, DistributedOptimizer):
        for param in part.model_param_gbuf_map:
            run, replica = part._get_model_param_range_map(param)["param"], part.distributed_optimizer_instance_id
            layout = shard_layout(entries[id(param)], run.start, run.end, replica=replica)
            yield param, part._get_main_param_and_optimizer_states(param)["param"], layout
    else:
        model = _model_params(part)
        for weights in (param for group in part.optimizer.param_groups for param in group["params"]):
            param = model.get(weights, weights)
            yield param, weights, shard_layout(entries[id(param)], 0, param.numel(), replica=0)


def entries_of(chunks: Any) -> dict[int, Any]:
    """Return the entries of the sharded state dicts of chunks that are not sharded, by the parameter's `id`."""
    bare = [chunk.module for chunk in chunks if not isinstance(chunk, FullyShardedChunk)]
    return {id(entry.data): entry for chunk in bare for entry in chunk.sharded_state_dict().values()}


def _model_params(part: Any) -> dict[Tensor, Tensor]:
    """Return the model's parameter of each fp32 copy of one, if one of megatron-core's optimizers has such copies."""
    pairs = zip(getattr(part, "float16_groups", ()), getattr(part, "fp32_from_float16_groups", ()), strict=True)
    return {main: model for models, mains in pairs for model, main in zip(models, mains, strict=True)}
