"""Find the fp32 weights that this rank updates, and copy the weights or their averages to the model.

The functions work for all of megatron-core's optimizers and for `ShardedOptimizer`. Exponential moving
averages (`--ema-decay`):

    a ← d·a + (1 − d)·θ  after each update; a begins with the first weights

Each rank averages the elements that it updates, with averages sharded like the rest of the optimizer's state, so that
ranks communicate only for an evaluation of the averages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import DistributedOptimizer
from torch import Tensor

from megavlm.optim.elementwise import AVERAGE
from megavlm.optim.fully_sharded import FullyShardedChunk, ShardedOptimizer
from megavlm.parallel.shards import ShardLayout, local_part, shard_layout


def held_layouts(part: Any, entries: Mapping[int, Any]) -> Iterator[tuple[Tensor, Tensor, ShardLayout]]:
    """Yield (parameter, fp32 weights that this rank updates, their layout) for the trained parameters of one of
    megatron-core's optimizers.

    `entries` are the entries of the model's sharded state dict, by the `id` of their parameter.
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
            entry = entries[id(param)]
            yield param, weights, shard_layout(entry, 0, param.numel(), replica=entry.replica_id[-1])


def entries_of(chunks: Any) -> dict[int, Any]:
    """Return the sharded state dict entries of chunks that are not fully sharded, by the parameter's `id`."""
    bare = [chunk.module for chunk in chunks if not isinstance(chunk, FullyShardedChunk)]
    return {id(entry.data): entry for chunk in bare for entry in chunk.sharded_state_dict().values()}


def _model_params(part: Any) -> dict[Tensor, Tensor]:
    """Map the fp32 copies in one of megatron-core's optimizers to the model's parameters; {} without copies."""
    pairs = zip(getattr(part, "float16_groups", ()), getattr(part, "fp32_from_float16_groups", ()), strict=True)
    return {main: model for models, mains in pairs for model, main in zip(models, mains, strict=True)}


def round_in_one_launch(part: Any) -> None:
    """Make one of megatron-core's optimizers copy its fp32 weights to the model in one launch.

    Its own method copies them one by one: 350 launches, which took the host 6 ms of each step on an H100.

    Its own method stays for weights in FP8, and in unsharded optimizers, which copy in one launch already.
    """
    if isinstance(part, DistributedOptimizer) and part.config.fp8_recipe is None:
        part._copy_main_params_to_model_params = partial(_round, cache(partial(_places, part)))


def give_model(optimizer: Any, chunks: Sequence[Any]) -> None:
    """Copy the optimizer's weights to the model, as at the end of a step, but outside of one; all ranks call it."""
    for part in optimizer.chained_optimizers:
        if not part.is_stub_optimizer and hasattr(part, "_copy_main_params_to_model_params"):
            part._copy_main_params_to_model_params()
    for chunk in chunks:
        if isinstance(chunk, FullyShardedChunk):
            chunk.reshard()  # gathered weights are old
        elif isinstance(chunk, DistributedDataParallel) and chunk.ddp_config.use_distributed_optimizer:
            chunk.start_param_sync(force_sync=True)


@torch.no_grad()
def average(optimizer: Any, decay: float) -> None:
    """Update the moving averages with an optimizer's current weights."""
    for weights, kept in _pairs(optimizer):
        kept.lerp_(weights.to(kept.device), 1 - decay)


@contextmanager
def averaged(optimizer: Any, chunks: Sequence[Any]) -> Iterator[None]:
    """Return a context in which the model has averaged weights, restored at exit; all ranks enter and leave it."""
    _exchange(optimizer, chunks)
    try:
        yield
    finally:
        _exchange(optimizer, chunks)


def _round(places: Callable[[], tuple[list[Tensor], list[Tensor]]]) -> None:
    """Copy a rank's fp32 weights to the model's buffers; `places` is cached, because buffers do not move."""
    targets, sources = places()
    if targets:
        torch._foreach_copy_(targets, sources)


def _places(part: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Return this rank's views of the parameter buffers that ranks gather, and the fp32 weights for these views.

    In fp32 both lists are empty: the optimizer's weights are views of the buffer.
    """
    targets, sources = [], []
    for models, mains in zip(part.model_float16_groups, part.shard_fp32_from_float16_groups, strict=True):
        for model, main in zip(models, mains, strict=True):
            run = part._get_model_param_range_map(model)["gbuf_world_in_bucket"]
            buffer, _, bucket = part.model_param_gbuf_map[model]
            targets.append(part.buffers[buffer].buckets[bucket].param_data.view(-1)[run.start : run.end])
            sources.append(main)
    return targets, sources


@torch.no_grad()
def _exchange(optimizer: Any, chunks: Sequence[Any]) -> None:
    """Swap weights and averages, and copy the new weights to the model, as at the end of a step."""
    for weights, kept in _pairs(optimizer):
        before = weights.clone()
        weights.copy_(kept)
        kept.copy_(before)
    give_model(optimizer, chunks)


def _pairs(optimizer: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the fp32 weights that this rank updates, each with its average."""
    for part in optimizer.chained_optimizers:
        if not part.is_stub_optimizer:
            inner = part.optimizer
            for weights in (p for group in inner.param_groups for p in group["params"]):
                yield local_part(weights), inner.state_of(weights)[AVERAGE]
