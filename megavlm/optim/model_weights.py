"""Give the model the fp32 weights that a rank updates: rounded to the model's type, all of them in one launch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import DistributedOptimizer
from torch import Tensor

from megavlm.optim.fully_sharded import FullyShardedChunk


def round_in_one_launch(part: Any) -> None:
    """Make one of megatron-core's optimizers copy its fp32 weights to the model in one launch.

    Its own method copies them one by one: 350 launches, which took the host 6 ms of each step on an H100.

    Weights that are kept in FP8 stay its own affair, as do optimizers that shard nothing, which copy so already.
    """
    if isinstance(part, DistributedOptimizer) and part.config.fp8_recipe is None:
        part._copy_main_params_to_model_params = _Rounding(part)


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


class _Rounding:
    """The copies of a rank, whose places are looked up once: buffers do not move."""

    def __init__(self, part: DistributedOptimizer) -> None:
        self._part: Any = part
        self._places: tuple[list[Tensor], list[Tensor]] | None = None

    def __call__(self) -> None:
        if self._places is None:
            self._places = _places(self._part)
        targets, sources = self._places
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
