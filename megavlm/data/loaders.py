"""Build the data loaders of a rank: of the training data and, if there are any, of the validation samples.

They decide which ranks read and which receive the data by broadcast. Every rank computes the samples of a
`ComputedSource` itself, and renders the images that it encodes. Files are read by the first rank of each model replica,
which sends the text to all of its ranks and each image to the ranks that encode it, so that no image is read or decoded
twice.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from megavlm.config.schema import Config
from megavlm.data.batch_sampler import BatchSampler, PackedBatchSampler, SequentialBatchSampler
from megavlm.data.broadcast import ReplicaBroadcast
from megavlm.data.collate import CollateSpec
from megavlm.data.collator import Collator, ComputedCollator, FileCollator
from megavlm.data.data_loader import DataLoader
from megavlm.data.epochs import windows_of
from megavlm.data.files import FilesSource
from megavlm.data.image_assignment import ImageAssignment
from megavlm.data.rank_loader import HostStaging, RankLoader
from megavlm.data.reads import Reads
from megavlm.data.source import ComputedSource
from megavlm.data.streaming import MAX_STREAM_WINDOW, StreamBatchSampler, StreamSource
from megavlm.data.validation import ValidationBatchSampler, ValidationSamples
from megavlm.data.windows import Windows
from megavlm.data.workers import Told, WorkerPool
from megavlm.errors import one_line
from megavlm.parallel.groups import Groups
from megavlm.resilience.events import events, record


@dataclass(frozen=True)
class Loaders:
    """The data loaders of a rank; `validation` is None without validation samples."""

    training: DataLoader
    validation: DataLoader | None


def build_loaders(
    config: Config,
    source: ComputedSource | FilesSource,
    groups: Groups,
    *,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    vision_group: dist.ProcessGroup | None,
    assignment: ImageAssignment | None = None,
    epoch: int = 0,
    validation: ValidationSamples | None = None,
) -> Loaders:
    """Return the data loaders of a run on this rank. `epoch` is the number of samples of an epoch; 0: not known.

    `vision_group` are the ranks of the replica that encode images; it is None on a rank that encodes none. Each of them
    encodes all images, or those that `assignment` gives it. Patches have the type `dtype`.
    """
    spec, staging = CollateSpec.of(config, source), HostStaging(dtype, device)
    if isinstance(source, ComputedSource):
        sampler = SequentialBatchSampler(count=config.train.global_batch_size)
        own_images = None if assignment is None else partial(assignment.own, rank=groups.replica_rank)
        collator = partial(ComputedCollator, source, with_patches=vision_group is not None, own_images=own_images)
        loader = DataLoader(_loader(config, sampler, collator(spec), groups, staging))
        if validation is None:
            return Loaders(loader, None)
        own = _validation_loader(config, validation, collator(_of(validation, spec)), groups, staging)
        return Loaders(loader, DataLoader(own))
    broadcast = ReplicaBroadcast(
        replica=groups.replica,
        vision_group=vision_group,
        device=device,
        assignment=assignment,
    )
    training = measured = None
    if broadcast.reads:
        if groups.coords.dp == 0:
            for warning in source.warnings():
                print(f"warning: {one_line(warning)}", flush=True)
        pool = _worker_pool(config, source)
        reads = Reads(config.data.worker_timeout)
        files = FileCollator(source, spec, pool=pool, reads=reads)
        if isinstance(source, StreamSource):
            training = _stream_loader(config, source, files, groups, staging, reads, epoch=epoch)
        else:
            training = _loader(config, build_batch_sampler(config, files, epoch=epoch), files, groups, staging, reads)
        if validation is not None:
            reads = Reads(config.data.worker_timeout)
            files = FileCollator(source, _of(validation, spec), pool=pool, reads=reads)
            measured = _validation_loader(config, validation, files, groups, staging, reads)
    return Loaders(
        DataLoader(training, broadcast=broadcast, replicas=groups.dp if isinstance(source, StreamSource) else None),
        None if validation is None else DataLoader(measured, broadcast=broadcast),
    )


def _of(validation: ValidationSamples, spec: CollateSpec) -> CollateSpec:
    return replace(spec, num_sources=len(validation.names))


def _worker_pool(config: Config, source: FilesSource) -> WorkerPool | None:
    """Return the processes of `--num-workers`, whose replacements are printed and recorded; None for 0.

    What the run gave up before it was started again stays given up, so that its sequences are the same.
    """
    data, run_dir = config.data, Path(config.run.run_dir)
    if not data.num_workers:
        return None

    def report(line: str, given_up: Told | None) -> None:
        print(f"warning: {one_line(line)}", file=sys.stderr, flush=True)
        record(run_dir, "worker", reason=line, given_up=given_up)

    given_up: list[Told] = []
    for event in [] if config.checkpoint.accept_changed_data else events(run_dir):
        match event.get("given_up"):
            case [str(part), str(name), str(sample)]:
                given_up.append((part, name, sample))
    return WorkerPool(source, data.num_workers, timeout=data.worker_timeout, given_up=given_up, report=report)


def build_batch_sampler(config: Config, collator: FileCollator, *, epoch: int = 0) -> PackedBatchSampler:
    """Return the batch sampler of map-style files: windows of consecutive samples of the blend."""
    windows = windows_of(config, epoch)
    return PackedBatchSampler(
        lambda number: collator.encode(windows.samples(number)),
        count=config.train.global_batch_size,
        windows=windows,
        seq_length=config.train.seq_length,
        packing=config.data.packing,
    )


def _stream_loader(
    config: Config,
    source: StreamSource,
    collator: FileCollator,
    groups: Groups,
    staging: HostStaging,
    reads: Reads,
    *,
    epoch: int,
) -> RankLoader:
    """Return the loader of a replica that reads its own part of the streams, and does not know those of the others."""
    at, dims, data, train = groups.coords, groups.dims, config.data, config.train
    sampler = StreamBatchSampler(
        source.reader(rank=at.dp, ranks=dims.dp, run_dir=Path(config.run.run_dir), reads=reads),
        collator,
        count=train.global_batch_size // dims.dp,
        windows=Windows(min(data.packing_window, MAX_STREAM_WINDOW), epoch / dims.dp),
        seq_length=train.seq_length,
        packing=data.packing,
    )
    return RankLoader(
        sampler,
        collator,
        dp_rank=0,
        dp_size=1,
        micro_batch_size=train.micro_batch_size,
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
        balance=config.data.balance,
        stage=staging,
        reads=reads,
    )


def _validation_loader(
    config: Config,
    validation: ValidationSamples,
    collator: ComputedCollator | FileCollator,
    groups: Groups,
    staging: HostStaging,
    reads: Reads | None = None,
) -> RankLoader:
    dims, train = groups.dims, config.train
    sampler = ValidationBatchSampler(
        validation.samples,
        collator.encode if isinstance(collator, FileCollator) else None,
        count=train.global_batch_size,
        # Ranks have as many micro-batches as one another, which interleaved stages take in rounds of as many as stages.
        multiple=train.micro_batch_size * dims.dp * (dims.pp if dims.vpp > 1 else 1),
        most=config.evaluation.eval_iters,
        windows=Windows(config.data.packing_window),
        seq_length=train.seq_length,
        packing=config.data.packing,
    )
    return _loader(config, sampler, collator, groups, staging, reads)
