"""Decide which rank writes which tensors of a checkpoint.

Data-parallel ranks that hold the same tensors divide them by size. The files have megatron-core's format: torch's
distributed checkpoint plus `common.pt` and `metadata.json`.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.core import CONFIG_FNAME, CheckpointingConfig
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from megatron.core.dist_checkpointing.strategies.filesystem_async import _split_by_size_and_type
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.dist_checkpointing.strategies.state_dict_saver import save_state_dict_async_plan
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch.distributed.checkpoint import Metadata
from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner

from megavlm.checkpoint.tensor_files import THREADS, Item


@dataclass(frozen=True)
class Share:
    """What a rank writes: files of tensors by name, and on rank 0 the files that exist once."""

    files: Mapping[str, Sequence[Item]]
    whole: Mapping[str, bytes]
    metadata: Metadata | None  # on rank 0: what tensors the checkpoint has, without where they are


def share_of_rank(state: dict[str, Any], *, group: dist.ProcessGroup, metadata: dict[str, Any]) -> Share:
    """Return what this rank writes of a sharded state; the ranks of `group` divide it. Every rank calls it."""
    state = {**_without_copies(state), "content_metadata": metadata}
    sharded, common = save_preprocess(state, False)  # dealing them checks that each tensor is written once
    strategy = get_default_save_sharded_strategy()
    FullyParallelSaveStrategyWrapper(strategy, group).apply_saving_parallelization(sharded)
    by_key, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded, keep_only_main_replica=True)
    collected = _Collector()
    planner = MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
    (_, tensors, _), *_ = save_state_dict_async_plan(
        mcore_to_pyt_state_dict(by_key), collected, None, 0, planner=planner
    )
    if dist.get_rank() != 0:
        return Share(collected.files, {}, None)
    packed = io.BytesIO()
    torch.save(common, packed)
    config = json.dumps(asdict(CheckpointingConfig(strategy.backend, strategy.version)))
    return Share(collected.files, {COMMON_STATE_FNAME: packed.getvalue(), CONFIG_FNAME: config.encode()}, tensors)


class _Collector:
    """Takes the place of torch's storage writer, and keeps in memory what it is told to write."""

    can_run_decentralized_global_plan = True  # ranks need not hear from rank 0 what to write

    def __init__(self) -> None:
        self.files: dict[str, list[Item]] = {}

    def set_up_storage_writer(self, is_coordinator: bool) -> None:
        pass

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_decentralized_global_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_write_data(self, plan: SavePlan, planner: SavePlanner) -> None:
        parts = [part for part in _split_by_size_and_type(THREADS, plan.items) if part]
        for number, part in enumerate(parts):
            items = [(item.index, planner.resolve_data(item)) for item in part]
            self.files[f"__{dist.get_rank()}_{number}{DEFAULT_SUFFIX}"] = items


def _without_copies(state: Any) -> Any:
    """Return the state without the second copy of tied embeddings, which a rank that holds both would write twice."""
    if isinstance(state, dict):
        return {key: _without_copies(value) for key, value in state.items() if not _is_copy(value)}
    return [_without_copies(value) for value in state if not _is_copy(value)] if isinstance(state, list) else state


def _is_copy(value: Any) -> bool:
    """Return whether a value is a second copy: `replica_id` is (copy, tensor-parallel rank, data-parallel rank)."""
    if not isinstance(value, (ShardedTensor, ShardedTensorFactory)) or isinstance(value.replica_id, int):
        return False
    return value.replica_id[0] != 0
