"""Which rank writes what of a checkpoint: data-parallel ranks that hold the same tensors deal them out by size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper


def write(state: dict[str, Any], folder: Path, *, group: dist.ProcessGroup, metadata: dict[str, Any]) -> None:
    """Write a sharded state; `group` are the ranks that deal. Every rank calls it.

    A rank's host memory takes what it writes: its own share, and of what all of `group` hold an even one.
    """
    dist_checkpointing.save(
        _without_copies(state),
        str(folder),
        FullyParallelSaveStrategyWrapper(get_default_save_sharded_strategy(), group),
        validate_access_integrity=False,  # the strategy does, after it has dealt
        content_metadata=metadata,
    )


def _without_copies(state: Any) -> Any:
    """Without the second copy of tied embeddings: where one rank has both, megatron-core would deal it both."""
    if isinstance(state, dict):
        return {key: _without_copies(value) for key, value in state.items() if not _is_copy(value)}
    return [_without_copies(value) for value in state if not _is_copy(value)] if isinstance(state, list) else state


def _is_copy(value: Any) -> bool:
    """Replicas of layers are numbered by (copy, tensor-parallel rank, data-parallel rank)."""
    if not isinstance(value, (ShardedTensor, ShardedTensorFactory)) or isinstance(value.replica_id, int):
        return False
    return value.replica_id[0] != 0
