"""Build the data loader of a run, which decides which ranks read and which receive the data by broadcast.

Every rank computes the samples of a `ComputedSource` itself, and renders the images that it encodes. Files are read by
the first rank of each model replica, which sends the text to all of its ranks and each image to the ranks that encode
it, so that no image is read or decoded twice.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megavlm.config.resolve import data_kind
from megavlm.config.schema import Config
from megavlm.data.batch_sampler import BatchSampler, PackedBatchSampler, SequentialBatchSampler
from megavlm.data.broadcast import ReplicaBroadcast
from megavlm.data.collate import CollateSpec
from megavlm.data.collator import Collator, ComputedCollator, FileCollator
from megavlm.data.files import FilesSource
from megavlm.data.image_assignment import ImageAssignment
from megavlm.data.rank_loader import HostStaging, RankLoader
from megavlm.data.reads import Reads
from megavlm.data.records import is_stream, open_records, prepare_stream
from megavlm.data.source import ComputedSource
from megavlm.data.streaming import MAX_STREAM_WINDOW, StreamBatchSampler, StreamSource
from megavlm.data.types import LoaderState, StepData
from megavlm.data.workers import WorkerPool
from megavlm.errors import UserError
from megavlm.parallel.groups import Groups
from megavlm.resilience.events import record


class DataLoader:
    """Returns the data of each step, on every rank of a replica, and the state to resume from."""

    def __init__(
        self,
        loader: RankLoader | None,
        *,
        broadcast: ReplicaBroadcast | None = None,
        replicas: dist.ProcessGroup | None = None,
    ) -> None:
        """Prepare the loader of a rank.

        `loader` is None on a rank that does not read. `replicas` is the data-parallel group if each replica has a state
        of its own, as with streams.
        """
        assert (loader is not None) == (broadcast is None or broadcast.reads)
        self._loader = loader
        self._broadcast = broadcast
        self._replicas = replicas
        self._peeked: tuple[LoaderState | None, StepData] | None = None
        self._before: LoaderState | None = None  # the state at which the last step began, on a rank that reads
        self._back = False

    def peek(self) -> StepData:
        """Return the data that `next_step` will return, without a change of state. Every rank of a replica calls it."""
        if self._peeked is None:
            state = self._own_state()
            self._peeked = state, self._read()
        return self._peeked[1]

    def next_step(self) -> StepData:
        """Return the data of the next optimizer step. Raises UserError on every rank of a replica alike."""
        if self._peeked is None:
            self._before = self._own_state()
            return self._read()
        (self._before, step), self._peeked = self._peeked, None
        return step

    def step_back(self) -> None:
        """Let `state_dict` return the state at which the last step began; no other step may follow."""
        self._back = True

    def is_ahead(self) -> bool:
        """Return whether the next step's data are prefetched, or could not be; true on a rank that does not read."""
        return self._loader is None or self._loader.is_ahead()

    def failure_ahead(self, *, unless: Callable[[], bool]) -> BaseException | None:
        """Wait until the prefetched step is ready or `unless()` is true; return the error that it raised, if any.

        The next step then raises this error on all ranks of the replica; the ranks of other replicas do not know.
        """
        return None if self._loader is None else self._loader.failure_ahead(unless=unless)

    def _read(self) -> StepData:
        if self._broadcast is None:
            return self._own.next_step()
        return self._broadcast.share(lambda: self._own.next_step())

    def state_dict(self) -> LoaderState:
        """Return the state at which the next step begins. Every rank must call it, since ranks communicate in it."""
        own = self._own_state() if self._peeked is None else self._peeked[0]
        if self._back:
            own = self._before
        if self._broadcast is not None:
            own = self._broadcast.share_state(own)
        assert own is not None
        state: LoaderState = own
        if self._replicas is None:
            return state
        states: list[Any] = [None] * self._replicas.size()
        dist.all_gather_object(states, state, group=self._replicas)
        return {"replicas": states}

    def load_state_dict(self, state: LoaderState) -> None:
        """Continue at a state. Raises UserError for one of other data, or of streams with other replicas."""
        self._peeked = None
        if self._replicas is not None:
            states = state.get("replicas")
            if states is None or len(states) != self._replicas.size():
                was = "other data" if states is None else f"{len(states)} data-parallel replicas"
                raise UserError(
                    f"the checkpoint is of a run on {was}, but each replica resumes its own part of a WebDataset: use "
                    f"the same --datasets and the same number of replicas, now {self._replicas.size()}"
                )
            state = states[self._replicas.rank()]
        if self._loader is not None:
            self._loader.load_state_dict(state)

    def close(self) -> None:
        """Stop prefetching."""
        if self._loader is not None:
            self._loader.close()

    def _own_state(self) -> LoaderState | None:
        """Return the state at which this rank's loader begins its next step; None on a rank that does not read."""
        return None if self._loader is None else self._loader.state_dict()

    @property
    def _own(self) -> RankLoader:
        assert self._loader is not None
        return self._loader


def build_data_loader(
    config: Config,
    source: ComputedSource | FilesSource,
    groups: Groups,
    *,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    vision_group: dist.ProcessGroup | None,
    assignment: ImageAssignment | None = None,
) -> DataLoader:
    """Return the data loader of a run on this rank.

    `vision_group` are the ranks of the replica that encode images; it is None on a rank that encodes none. Each of them
    encodes all images, or those that `assignment` gives it. Patches have the type `dtype`.
    """
    spec = CollateSpec.of(config, source)
    staging = HostStaging(dtype, device)
    if isinstance(source, ComputedSource):
        sampler = SequentialBatchSampler(count=config.train.global_batch_size)
        own_images = None if assignment is None else partial(assignment.own, rank=groups.mp_rank)
        collator = ComputedCollator(source, spec, with_patches=vision_group is not None, own_images=own_images)
        return DataLoader(_loader(config, sampler, collator, groups, staging))
    broadcast = ReplicaBroadcast(
        replica=groups.collection.mp,
        vision_group=vision_group,
        device=device,
        patch_dim=spec.patch_dim,
        assignment=assignment,
    )
    streams = isinstance(source, StreamSource)
    loader = None
    if broadcast.reads:
        if groups.coords.dp == 0:
            for warning in source.warnings():
                print(f"warning: {warning}", flush=True)
        reads = Reads(config.data.worker_timeout)
        files = FileCollator(source, spec, pool=_worker_pool(config, source), reads=reads)
        if isinstance(source, StreamSource):
            loader = _stream_loader(config, source, files, groups, staging, reads)
        else:
            loader = _loader(config, build_batch_sampler(config, files), files, groups, staging, reads)
    return DataLoader(loader, broadcast=broadcast, replicas=groups.dp if streams else None)


def _worker_pool(config: Config, source: FilesSource) -> WorkerPool | None:
    """Return the processes of `--num-workers`, whose replacements are printed and recorded; None for 0."""
    data = config.data
    if not data.num_workers:
        return None

    def report(line: str) -> None:
        print(f"warning: {line}", file=sys.stderr, flush=True)
        record(Path(config.run.run_dir), "worker", reason=line)

    return WorkerPool(source, data.num_workers, timeout=data.worker_timeout, report=report)


def build_batch_sampler(config: Config, collator: FileCollator) -> PackedBatchSampler:
    """Return the batch sampler of map-style files: windows of consecutive samples of the blend."""
    size = config.data.packing_window
    return PackedBatchSampler(
        lambda number: collator.encode(range(number * size, (number + 1) * size)),
        count=config.train.global_batch_size,
        window=size,
        seq_length=config.train.seq_length,
        packing=config.data.packing,
    )


def prepare_data(config: Config) -> None:
    """Open every data set once, before all ranks rely on it, and index tars that have no index. One rank calls it.

    Raises UserError for a data set that cannot be read.
    """
    if data_kind(config) != "files":
        return
    for source in config.data.datasets:
        if is_stream(source):
            prepare_stream(source, run_dir=Path(config.run.run_dir), log=print)
        else:
            open_records(source)


def _stream_loader(
    config: Config, source: StreamSource, collator: FileCollator, groups: Groups, staging: HostStaging, reads: Reads
) -> RankLoader:
    """Return the loader of a replica that reads its own part of the streams, and does not know those of the others."""
    at, dims, data, train = groups.coords, groups.dims, config.data, config.train
    sampler = StreamBatchSampler(
        source.reader(rank=at.dp, ranks=dims.dp, run_dir=Path(config.run.run_dir), reads=reads),
        collator,
        count=train.global_batch_size // dims.dp,
        window=min(data.packing_window, MAX_STREAM_WINDOW),
        seq_length=train.seq_length,
        packing=data.packing,
    )
    return RankLoader(
        sampler,
        collator,
        dp_rank=0,
        dp_size=1,
        micro_batch_size=train.micro_batch_size,
        global_batch_size=train.global_batch_size // dims.dp,
        balance=data.balance,
        alone=True,
        stage=staging,
        reads=reads,
    )


def _loader(
    config: Config,
    sampler: BatchSampler,
    collator: Collator,
    groups: Groups,
    staging: HostStaging,
    reads: Reads | None = None,
) -> RankLoader:
    return RankLoader(
        sampler,
        collator,
        dp_rank=groups.coords.dp,
        dp_size=groups.dims.dp,
        micro_batch_size=config.train.micro_batch_size,
        global_batch_size=config.train.global_batch_size,
        balance=config.data.balance,
        stage=staging,
        reads=reads,
    )
