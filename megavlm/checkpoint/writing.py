"""Decide which rank writes which tensors of a checkpoint.

Data-parallel ranks that hold the same tensors divide them by size. The files have megatron-core's format: torch's
distributed checkpoint plus `common.pt` and `metadata.json`. Ranks tell each other of all their tensors at the first
save; as long as these stay what they were, later saves need no more than one word from each.
"""

from __future__ import annotations

import io
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.core import CONFIG_FNAME, CheckpointingConfig
from megatron.core.dist_checkpointing.dict_utils import nested_values
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

    name: str  # of this save, the same on all ranks
    files: Mapping[str, Sequence[Item]]
    whole: Mapping[str, bytes]
    metadata: Metadata | None  # on rank 0: what tensors the checkpoint has, without where they are; None: as before


class Division:
    """How the ranks divide their state among them. It is found anew when the state of a rank has other tensors."""

    def __init__(self) -> None:
        self._tensors: list[Any] | None = None  # of the last save, without their values
        self._strategy: FullyParallelSaveStrategyWrapper | None = None
        self._plan: tuple[SavePlan, SavePlan, bool] | None = None  # as `save_state_dict_async_plan` takes it

    def share(self, state: dict[str, Any], *, group: dist.ProcessGroup, metadata: dict[str, Any]) -> Share:
        """Return what this rank writes of a sharded state; the ranks of `group` divide it. Every rank calls it."""
        sharded, common = save_preprocess({**_without_copies(state), "content_metadata": metadata}, False)
        name = self._agree(sharded, group)
        assert self._strategy is not None
        if self._plan is None or group.size() > 1:  # at first it also checks that each tensor is written once
            self._strategy.apply_saving_parallelization(sharded)
        by_key, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded, keep_only_main_replica=True)
        collected = _Collector()
        (_, described, _), plan, local, *_ = save_state_dict_async_plan(
            mcore_to_pyt_state_dict(by_key),
            collected,
            None,
            0,
            planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
            cached_ckpt_structure=self._plan,
        )
        self._plan = (plan, local, True)
        if dist.get_rank() != 0:
            return Share(name, collected.files, {}, None)
        if described is not None:
            described.all_local_plans = None  # megatron-core notes them to compare plans, which is done here
        packed = io.BytesIO()
        torch.save(common, packed)
        config = json.dumps(asdict(CheckpointingConfig(self._strategy.backend, self._strategy.version)))
        whole = {COMMON_STATE_FNAME: packed.getvalue(), CONFIG_FNAME: config.encode()}
        return Share(name, collected.files, whole, described)

    def _agree(self, sharded: Any, group: dist.ProcessGroup) -> str:
        """Forget the division, on all ranks, if any rank's tensors are not those of the last save; return a name."""
        tensors = [each.without_data() for each in nested_values(sharded)]
        found: list[tuple[bool, str]] = [(False, "")] * dist.get_world_size()
        dist.all_gather_object(found, (tensors == self._tensors, f"{time.time_ns():x}"))
        if not all(same for same, _ in found):
            strategy = get_default_save_sharded_strategy()
            self._strategy = FullyParallelSaveStrategyWrapper(strategy, group, do_cache_distribution=True)
            self._tensors, self._plan = tensors, None
        return found[0][1]


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
