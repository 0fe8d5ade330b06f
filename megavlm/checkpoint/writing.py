"""Which rank writes what of a checkpoint, and the files themselves.

Data-parallel ranks that hold the same tensors deal them out by size. What comes out is megatron-core's format: torch's
distributed checkpoint plus `common.pt` and `metadata.json`.
"""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, cast

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
from torch.distributed.checkpoint import FileSystemWriter, Metadata
from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX, _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.serialization import get_crc32_options, set_crc32_options

from megavlm.checkpoint.manifest import FileSum, SummingFile, in_words

THREADS = 2  # files of a rank, each written by a thread

Item = tuple[MetadataIndex, torch.Tensor | io.BytesIO]


@dataclass(frozen=True)
class Share:
    """What a rank writes: files of tensors by name, and on rank 0 the files that exist once."""

    files: Mapping[str, Sequence[Item]]
    whole: Mapping[str, bytes]
    metadata: Metadata | None  # on rank 0: what tensors the checkpoint has, without where they are


@dataclass(frozen=True)
class Written:
    """Where the items of a rank's files are, and the sums of these files."""

    results: Sequence[WriteResult]
    sums: Mapping[str, FileSum]


class SaveError(Exception):
    """A file of a checkpoint could not be written. The message says which and why, in one line."""


def share_of_rank(state: dict[str, Any], *, group: dist.ProcessGroup, metadata: dict[str, Any]) -> Share:
    """Return what this rank writes of a sharded state; `group` are the ranks that deal. Every rank calls it."""
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
    """Stands where torch expects a writer of storage, and keeps what it is told to write."""

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


def write_share(folder: Path, files: Mapping[str, Sequence[Item]], whole: Mapping[str, bytes]) -> Written:
    """Write a rank's files. Raises SaveError."""
    results: list[WriteResult] = []
    sums: dict[str, FileSum] = {}
    lock = threading.Lock()

    def write(name: str) -> None:
        items = files[name] if name in files else whole[name]
        found, total = write_file(folder / name, items)
        with lock:
            results.extend(found)
            sums[name] = total

    with _without_record_sums(), ThreadPoolExecutor(THREADS) as pool:
        for _ in pool.map(write, [*files, *whole]):
            pass  # an error of any is raised here
    return Written(results, sums)


def write_file(path: Path, content: Sequence[Item] | bytes) -> tuple[list[WriteResult], FileSum]:
    """Write one file; return where its items are and its sum. Raises SaveError."""
    results = []
    stream = None
    try:
        with path.open("wb") as file:
            stream = SummingFile(file)
            if isinstance(content, bytes):
                stream.write(content)
            else:
                for index, data in content:
                    start = stream.tell()
                    if isinstance(data, io.BytesIO):
                        stream.write(data.getbuffer())
                    else:
                        torch.save(_alone(data), cast(IO[bytes], stream))  # of a file it uses `write`
                    length = stream.tell() - start
                    results.append(WriteResult(index, length, _StorageInfo(path.name, start, length)))
    except OSError as error:
        raise SaveError(f"{path.name} cannot be written: {in_words(error)}") from error
    except RuntimeError as error:
        # torch's archive goes on after a write that failed, and complains of that.
        cause = stream.error if stream is not None else None
        raise SaveError(f"{path.name} cannot be written: {in_words(cause) if cause else error}") from error
    return results, stream.sum


def write_metadata(folder: Path, metadata: Metadata, written: Sequence[Written]) -> None:
    """Write `.metadata`, which says where all ranks' tensors are. Raises SaveError."""
    try:
        FileSystemWriter(folder).finish(metadata, [list(each.results) for each in written])
    except OSError as error:
        raise SaveError(f".metadata cannot be written: {in_words(error)}") from error


def _alone(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor in host memory with a storage of its own: `torch.save` writes storages whole."""
    tensor = tensor.detach().cpu()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


@contextmanager
def _without_record_sums() -> Any:
    """Let `torch.save` not sum up records: that takes four times as long as writing them, and no reader looks."""
    before = get_crc32_options()
    set_crc32_options(False)
    try:
        yield
    finally:
        set_crc32_options(before)


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
