"""Find the fp32 weights that this rank updates, with their state, and give the model these or their averages.

The answers do not depend on which of megatron-core's optimizers, or ours, holds a parameter. Exponential moving
averages (`--ema-decay`):

    a ← d·a + (1 − d)·θ  after each update; a begins with the first weights

Each rank averages the elements that it updates, with averages sharded like the rest of the optimizer's state, so that
nothing is exchanged but for an evaluation of the averages.
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
            entry = entries[id(param)]
            yield param, weights, shard_layout(entry, 0, param.numel(), replica=entry.replica_id[-1])


def entries_of(chunks: Any) -> dict[int, Any]:
    """Return the entries of the sharded state dicts of chunks that are not sharded, by the parameter's `id`."""
    bare = [chunk.module for chunk in chunks if not isinstance(chunk, FullyShardedChunk)]
    return {id(entry.data): entry for chunk in bare for entry in chunk.sharded_state_dict().values()}


def _model_params(part: Any) -> dict[Tensor, Tensor]:
    """Return the model's parameter of each fp32 copy of one, if one of megatron-core's optimizers has such copies."""
    pairs = zip(getattr(part, "float16_groups", ()), getattr(part, "fp32_from_float16_groups", ()), strict=True)
    return {main: model for models, mains in pairs for model, main in zip(models, mains, strict=True)}


def round_in_one_launch(part: Any) -> None:
    """Make one of megatron-core's optimizers copy its fp32 weights to the model in one launch.

    Its own method copies them one by one: 350 launches, which took the host 6 ms of each step on an H100.

    Weights that are kept in FP8 stay its own affair, as do optimizers that shard nothing, which copy so already.
    """
    if isinstance(part, DistributedOptimizer) and part.config.fp8_recipe is None:
        part._copy_main_params_to_model_params = partial(_round, cache(partial(_places, part)))


def give_model(optimizer: Any, chunks: Sequence[Any]) -> None:
    """Give the model the optimizer's weights outside of a step, as at the end of one; all ranks call it."""
    for part in optimizer.chained_optimizers:
        if not part.is_stub_optimizer and hasattr(part, "_copy_main_params_to_model_params"):
            part._copy_main_params_to_model_params()
    for chunk in chunks:
        if isinstance(chunk, FullyShardedChunk):
            chunk.reshard()  # what is gathered is of before
        elif isinstance(chunk, DistributedDataParallel) and chunk.ddp_config.use_distributed_optimizer:
            chunk.start_param_sync(force_sync=True)


@torch.no_grad()
def average(optimizer: Any, decay: float) -> None:
    """Let the weights that an optimizer has updated enter their averages."""
    for weights, kept in _pairs(optimizer):
        kept.lerp_(weights.to(kept.device), 1 - decay)


@contextmanager
def averaged(optimizer: Any, chunks: Sequence[Any]) -> Iterator[None]:
    """Return a context in which the model has averaged weights; all ranks enter and leave it. It leaves no trace."""
    _exchange(optimizer, chunks)
    try:
        yield
    finally:
        _exchange(optimizer, chunks)


def _round(places: Callable[[], tuple[list[Tensor], list[Tensor]]]) -> None:
    """Copy a rank's weights between places that are looked up once: buffers do not move."""
    targets, sources = places()
    if targets:
        torch._foreach_copy_(targets, sources)


def _places(part: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Return where this rank's rows of each parameter lie in the buffer that ranks gather, and their fp32 weights.

    In fp32 the optimizer's weights are that buffer.
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
    """Exchange weights and averages, and give the model the new weights, as at the end of a step."""
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
