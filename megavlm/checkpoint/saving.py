"""Save checkpoints while training goes on: a rank copies its state into shared memory, and a writer process writes it.

At most one save is under way; the next save waits for its end. A save that fails does not end the run: the earlier
checkpoints are whole.

Data-parallel ranks that hold the same tensors divide them by size. The files have megatron-core's format: torch's
distributed checkpoint plus `common.pt`, which `state.json` repeats, and `metadata.json`. At the first save, ranks
that share tensors gather the descriptions of these, and rank 0 those of all ranks, to check that each is written once;
while these do not change, a later save gathers only a flag from each rank.
"""

from __future__ import annotations

import gc
import io
import json
import multiprocessing
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

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

from megavlm.backend import patches
from megavlm.checkpoint import folders
from megavlm.checkpoint.folders import Keep
from megavlm.checkpoint.items import STATE, state_as_json
from megavlm.checkpoint.manifest import SUMMARY, in_words
from megavlm.checkpoint.staging import THREADS, Item, Places, Staging
from megavlm.checkpoint.writer import PATIENCE, Outcome, SaveJob, is_committed, reports_of, serve
from megavlm.parallel.rendezvous import of_all_ranks
from megavlm.resilience.signals import how_it_ended

_GIVEN_UP = 20.0  # seconds that a run that ends by an error waits for a save that is under way
_LOOK = 1.0  # seconds between checks for signs of life of the writer


@dataclass(frozen=True)
class Share:
    """A rank's part of a save: files of tensors by name, and on rank 0 also the files that a checkpoint has once."""

    name: str  # of this save, the same on all ranks
    files: Mapping[str, Sequence[Item]]
    whole: Mapping[str, bytes]
    metadata: Metadata | None  # on rank 0: the checkpoint's tensors, without their places; None: as in the last save


class Division:
    """Divides the state to save among the ranks. The division is kept until the tensors of a rank's state change."""

    def __init__(self) -> None:
        self._tensors: list[Any] | None = None  # of the last save, without their values
        self._strategy: FullyParallelSaveStrategyWrapper | None = None
        self._plan: tuple[SavePlan, SavePlan, bool] | None = None  # as `save_state_dict_async_plan` takes it

    def share(self, state: dict[str, Any], *, group: dist.ProcessGroup, metadata: dict[str, Any]) -> Share:
        """Return this rank's share of a sharded state, which the ranks of `group` divide. Every rank calls it."""
        sharded, common = save_preprocess({**_without_copies(state), "content_metadata": metadata}, False)
        name = self._agree(sharded, group)
        assert self._strategy is not None
        if self._plan is None or group.size() > 1:  # the first call also checks that each tensor is written once
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
            described.all_local_plans = None  # megatron-core keeps them to compare plans, which `_agree` does here
        packed = io.BytesIO()
        torch.save(common, packed)
        config = json.dumps(asdict(CheckpointingConfig(self._strategy.backend, self._strategy.version)))
        whole = {STATE: state_as_json(common), COMMON_STATE_FNAME: packed.getvalue(), CONFIG_FNAME: config.encode()}
        return Share(name, collected.files, whole, described)

    def _agree(self, sharded: Any, group: dist.ProcessGroup) -> str:
        """Drop the division, on all ranks, if the tensors of any rank have changed; return a name for the save."""
        tensors = [each.without_data() for each in nested_values(sharded)]
        found = of_all_ranks((tensors == self._tensors, f"{time.time_ns():x}"))
        if not all(same for same, _ in found):
            patches.describe_tensors_to_rank_0()
            strategy = get_default_save_sharded_strategy()
            self._strategy = FullyParallelSaveStrategyWrapper(strategy, group, do_cache_distribution=True)
            self._tensors, self._plan = tensors, None
        return found[0][1]


class _Collector:
    """Replaces torch's storage writer, and keeps the items to write in memory."""

    can_run_decentralized_global_plan = True  # ranks plan their writes without rank 0

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
            items = [(item.index, cast(torch.Tensor, planner.resolve_data(item))) for item in part]
            self.files[f"__{dist.get_rank()}_{number}{DEFAULT_SUFFIX}"] = items


def _without_copies(state: Any) -> Any:
    """Return the state without the second copy of tied embeddings: a rank that holds both would write them twice."""
    if isinstance(state, dict):
        return {key: _without_copies(value) for key, value in state.items() if not _is_copy(value)}
    return [_without_copies(value) for value in state if not _is_copy(value)] if isinstance(state, list) else state


def _is_copy(value: Any) -> bool:
    """Return whether a value is a second copy: `replica_id` is (copy, tensor-parallel rank, data-parallel rank)."""
    if not isinstance(value, (ShardedTensor, ShardedTensorFactory)) or isinstance(value.replica_id, int):
        return False
    return value.replica_id[0] != 0


@dataclass(frozen=True, kw_only=True)
class SaveReport(Outcome):
    """Result of a save on this rank; on rank 0, the result for the whole checkpoint."""

    iteration: int
    folder: Path
    seconds: float  # from the beginning of the save until the rank received the outcome


class Saver:
    """Runs the saves of a rank. Create it before threads and process groups exist: it forks the writer process."""

    def __init__(self, root: Path, keep: Keep) -> None:
        self._root, self._keep = root, keep
        self._staging = Staging()
        self.division = Division()
        self._job: SaveJob | None = None  # under way
        self._began = 0.0
        self._reports: list[SaveReport] = []
        self.waits: Callable[[], None] = lambda: None  # is called about every second while `wait` waits
        self._start()

    def begin(self, share: Share, summary: dict[str, Any]) -> None:
        """Start to save this rank's share, and return as soon as it is copied. Every rank must call this.

        The previous save must have ended on all ranks, because rank 0's writer deletes unfinished saves at the end.
        """
        assert self._job is None
        self._began = time.perf_counter()
        places: Places = {}
        failure = None
        try:
            places = self._staging.copy(share.files)
        except OSError as error:  # this rank's writer must report the error: rank 0's waits for its report
            failure = f"rank {dist.get_rank()} cannot copy its part to host memory ({in_words(error)})"
        whole = dict(share.whole)
        if dist.get_rank() == 0:
            whole[SUMMARY] = (json.dumps(summary, indent=2) + "\n").encode()
        self._job = SaveJob(
            root=self._root,
            iteration=int(summary["iteration"]),
            attempt=share.name,
            rank=dist.get_rank(),
            world=dist.get_world_size(),
            places=places,
            whole=whole,
            metadata=share.metadata,
            keep=self._keep,
            memory=self._staging.bytes,
            failure=failure,
        )
        self._pulse.value = time.monotonic()
        try:
            self._connection.send(self._job)
        except (BrokenPipeError, ConnectionResetError):
            self._lost()

    def poll(self) -> list[SaveReport]:
        """Return the reports of saves that have ended since the last call, without waiting."""
        if self._job is not None:
            self._receive(0.0)
        reports, self._reports = self._reports, []
        return reports

    def wait(self) -> None:
        """Wait until no rank has a save under way; every rank must call this. `poll` returns this rank's report.

        Ranks whose writers are done go on telling the others, every second: one that waited in a collective for a slow
        writer would count as hanging.
        """
        while any(of_all_ranks(self._job is not None)):
            self.waits()  # the loop ends: a writer without a sign of life is killed
            if self._job is not None:
                self._receive(_LOOK)
        if not self._process.is_alive():
            self._replace_writer()

    def close(self) -> None:
        """End the writer process. A save that is under way gets 20 s to end."""
        if self._job is not None:
            self._receive(_GIVEN_UP)
        self._connection.close()
        self._process.join(timeout=1)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._staging.close()

    def _start(self) -> None:
        context = multiprocessing.get_context("fork")
        self._connection, theirs = context.Pipe()
        self._pulse = context.RawValue("d", time.monotonic())
        shared = (theirs, self._connection, self._pulse, self._staging.file)
        self._process = context.Process(target=_serve, args=shared, daemon=True)
        self._process.start()
        theirs.close()

    def _receive(self, patience: float) -> None:
        """Wait at most `patience` seconds for the outcome of the save that is under way, and record it."""
        try:
            if self._connection.poll(patience):
                self._end(self._connection.recv())
            elif time.monotonic() - self._pulse.value > PATIENCE:
                self._process.kill()
                self._lost(f"the process that writes checkpoints wrote nothing for {PATIENCE:.0f} s")
        except (EOFError, ConnectionResetError):
            self._lost()

    def _lost(self, reason: str | None = None) -> None:
        """Give up the current save, whose writer has died, and start another writer for the next save."""
        assert self._job is not None
        ended = how_it_ended(self._process, _GIVEN_UP)
        reason = f"rank {self._job.rank}: {reason or f'the process that writes checkpoints {ended}'}"
        self._replace_writer()
        with suppress(OSError):  # so that rank 0's writer does not wait for this rank
            reports_of(self._job).leave(self._job.rank, None, reason)
        self._end(Outcome(None if is_committed(self._job) else reason))

    def _replace_writer(self) -> None:
        self._connection.close()
        self._start()
        self.division = Division()  # the new writer has no metadata: ranks gather their tensors again

    def _end(self, outcome: Outcome) -> None:
        assert self._job is not None
        seconds = time.perf_counter() - self._began
        folder = folders.folder_for(self._root, self._job.iteration)
        self._reports.append(SaveReport(**vars(outcome), iteration=self._job.iteration, folder=folder, seconds=seconds))
        self._job = None


def _serve(connection: Connection, of_the_rank: Connection, pulse: Any, file: int) -> None:
    # The rank's garbage must not be collected here: destructors of process groups and GPU memory need threads that this
    # process lacks, and a signal would end it. A writer that replaces another is forked in the middle of a run.
    gc.freeze()
    of_the_rank.close()  # else this process would keep the socket open, and not notice the end of its rank
    serve(connection, pulse, file)
