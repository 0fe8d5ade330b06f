"""Make chunks data-parallel, and wait for updated parameters that are gathered during the forward pass.

With `--overlap-param-gather` a rank has, after an optimizer step, new values only for its shard of each bucket.
megatron-core lets a module wait, in a forward pre-hook, for the buckets of the parameters that it owns itself. This is
not enough for a module that reads parameters of submodules which it never calls: its class sets `reads_below = True`,
so that it waits for parameters of its submodules, too. Code that reads parameters outside a forward pass calls
`gather_parameters` first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from torch import nn

from megavlm.config.derived import shards_gradients
from megavlm.config.schema import Config
from megavlm.model.vlm import VLMChunk
from megavlm.optim.fully_sharded import FullyShardedChunk
from megavlm.optim.slow_links import compress_links
from megavlm.parallel.groups import Groups, levels_of
from megavlm.resilience.phases import COMMUNICATION, Phases

# Ranks from which buckets end at a multiple of 2^16 elements: each then sends a multiple of a power of two to the next
# in the ring, for which NCCL reaches most of a bus (megatron-core says so). With fewer ranks messages are long enough.
PADDED_FROM = 64


def wait_before_reading(wrapped: DistributedDataParallel) -> None:
    """Let modules with `reads_below` wait for the parameters of their submodules; check all waits once (`_Watch`)."""
    for module in wrapped.module.modules():
        if getattr(module, "reads_below", False):
            module.register_forward_pre_hook(partial(_wait, wrapped))
    _Watch(wrapped)


def gather_parameters(chunks: Sequence[Any]) -> None:
    """Gather the updated parameters on every data-parallel rank and wait for them; every rank calls it.

    Chunks without `--overlap-param-gather` are skipped: their parameters are gathered at the end of a step.
    """
    for chunk in chunks:
        if isinstance(chunk, DistributedDataParallel) and chunk.ddp_config.overlap_param_gather:
            chunk.start_param_sync(force_sync=True)


def count_waits(chunks: Sequence[Any], phases: Phases) -> None:
    """Count waits for gathered parameters inside forward passes as communication time.

    Otherwise a rank that waits for a slow rank would seem to compute.
    """
    for chunk in chunks:
        if isinstance(chunk, DistributedDataParallel) and chunk.ddp_config.overlap_param_gather:
            for group in chunk.bucket_groups:
                group.finish_param_sync = partial(_counted, group.finish_param_sync, phases)


def _counted(wait: Callable[..., None], phases: Phases, *args: Any, **kwargs: Any) -> None:
    before = phases.now
    phases.enter(COMMUNICATION, "parameters")
    wait(*args, **kwargs)
    phases.enter(before.phase, before.detail)


def _wait(wrapped: DistributedDataParallel, module: nn.Module, *_: Any) -> None:
    for param in module.parameters():
        if param in wrapped.param_to_bucket_group:
            wrapped.param_to_bucket_group[param].finish_param_sync(
                skip_next_bucket_dispatch=wrapped.ddp_config.align_param_gather
            )


class _Watch:
    """Checks, in a chunk's first training pass, that a module waits for the gather of each trained parameter."""

    def __init__(self, wrapped: DistributedDataParallel) -> None:
        self.unread = {param: name for name, param in wrapped.module.named_parameters() if param.requires_grad}
        modules = list(wrapped.module.modules())
        self.hooks = [module.register_forward_pre_hook(self._reads) for module in modules]
        self.hooks.append(wrapped.module.register_forward_hook(self._end))

    def _reads(self, module: nn.Module, *_: Any) -> None:
        for param in module.parameters(recurse=getattr(module, "reads_below", False)):
            self.unread.pop(param, None)

    def _end(self, *_: Any) -> None:
        if not torch.is_grad_enabled():
            return  # an evaluation need not use every part of the model
        for hook in self.hooks:
            hook.remove()
        assert not self.unread, (
            f"nothing waits for the gathered {', '.join(self.unread.values())}: a module that reads parameters of "
            "modules which it does not call needs `reads_below = True`"
        )


def shard_chunks(
    chunks: Sequence[VLMChunk], config: Config, groups: Groups, device: torch.device
) -> list[FullyShardedChunk]:
    """Shard chunks, which are on `meta`, over the data-parallel ranks: gradients, and weights too (ZeRO-2 and 3)."""
    size = config.parallel.secondary_shard_size
    secondary = None if size == groups.shard.size() else levels_of(groups.shard, size, groups.maker)
    compressing = levels_of(groups.shard, config.parallel.compress_group_size, groups.maker)
    return [
        FullyShardedChunk(chunk, config, groups, device=device, secondary=secondary, compressing=compressing)
        for chunk in chunks
    ]


def wrap_chunks(chunks: Sequence[VLMChunk], config: Config, groups: Groups) -> list[Any]:
    """Make chunks data-parallel: gradient buffers that are reduced (or reduce-scattered) over the ranks."""
    parallel = config.parallel
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=not parallel.grad_reduce_in_bf16,
        overlap_grad_reduce=bool(parallel.overlap_grad_reduce),
        overlap_param_gather=bool(parallel.overlap_param_gather),
        # Interleaved chunks are gathered when the schedule says so (`param_sync_func`).
        align_param_gather=bool(parallel.overlap_param_gather) and len(chunks) > 1,
        bucket_size=parallel.ddp_bucket_size,
        use_distributed_optimizer=parallel.data_parallel_sharding != "none",
        num_distributed_optimizer_instances=groups.dp_cp.size() // groups.shard.size(),
        fp8_param_gather=config.precision.fp8_param_gather,
        pad_buckets_for_high_nccl_busbw=groups.shard.size() >= PADDED_FROM,
    )
    # Only the first chunk's gradients end on the critical path; bucketing the others buys no overlap.
    wrapped = [
        DistributedDataParallel(
            chunk.config,
            ddp_config,
            chunk,
            disable_bucketing=index > 0,
            pg_collection=groups.collection,
        )
        for index, chunk in enumerate(chunks)
    ]
    for each in wrapped:
        compress_links(each, config, groups)
    if parallel.overlap_param_gather:
        for each in wrapped:
            wait_before_reading(each)
    return wrapped


def with_whole_gradients(config: Config) -> Config:
    """Return the configuration with whole gradients (ZeRO-1 at most), which a colocated encoder needs.

    Ranks run it different numbers of times, so they cannot gather its layers together.
    """
    if not shards_gradients(config):
        return config
    return replace(config, parallel=replace(config.parallel, data_parallel_sharding="optimizer"))
