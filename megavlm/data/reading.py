"""Build the data loader of a run: its batch sampler, its collator, and the ranks that read."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

from megavlm.config.resolve import data_kind
from megavlm.config.schema import Config
from megavlm.data.batch_sampler import BatchSampler, PackedBatchSampler, SequentialBatchSampler
from megavlm.data.collator import Collator, InlineCollator, WorkerCollator
from megavlm.data.data_loader import DataLoader, PatchShards, ReplicaBroadcast
from megavlm.data.files import FilesSource
from megavlm.data.rank_loader import RankLoader
from megavlm.data.records import is_stream, open_records, open_stream, prepare_stream
from megavlm.data.source import Source
from megavlm.data.staging import Staging
from megavlm.data.streaming import MAX_STREAM_WINDOW, StreamBatchSampler, StreamReader
from megavlm.parallel.groups import Groups


def prepare_data(config: Config) -> None:
    """Look at every data set once, before all ranks rely on it; index tars that nobody has. One rank calls it.

    Raises UserError for one that cannot be read.
    """
    if data_kind(config) != "files":
        return
    for source in config.data.datasets:
        if is_stream(source):
            prepare_stream(source, run_dir=Path(config.run.run_dir), log=print)
        else:
            open_records(source)


def build_data_loader(
    config: Config,
    source: Source,
    groups: Groups,
    *,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    vision_group: dist.ProcessGroup | None,
    patch_shards: PatchShards | None = None,
) -> DataLoader:
    """Return the data loader of a run on this rank.

    `vision_group` are the ranks of its replica that need pixels, None on another rank; `patch_shards` returns the rows
    of patches that each of them needs, if not all. Patches have the type `dtype`.
    """
    staging = Staging(dtype, device)
    if data_kind(config) != "files":
        in_order = SequentialBatchSampler(count=config.train.global_batch_size)
        in_thread = InlineCollator(source, seq_length=config.train.seq_length, with_patches=vision_group is not None)
        return DataLoader(_loader(config, in_order, in_thread, groups, staging))
    exchange = ReplicaBroadcast(
        replica=groups.collection.mp,
        vision_group=vision_group,
        device=device,
        patch_dim=source.patch_dim,
        patch_shards=patch_shards,
    )
    assert isinstance(source, FilesSource)
    if exchange.reads and groups.coords.dp == 0:
        for warning in source.warnings():
            print(f"warning: {warning}", flush=True)
    forward = any(is_stream(each) for each in config.data.datasets)
    replicas = groups.dp if forward else None
    loader = None
    if exchange.reads:
        collator = build_collator(config, source)
        loader = (
            _stream_loader(config, source, collator, groups, staging)
            if forward
            else _loader(config, build_batch_sampler(config, collator), collator, groups, staging)
        )
    return DataLoader(loader, exchange=exchange, replicas=replicas)


def build_collator(config: Config, source: Source) -> Collator:
    """Reads in `--num-workers` processes, or in the loader's thread."""
    if not config.data.num_workers:
        return InlineCollator(source, seq_length=config.train.seq_length, with_patches=True)
    return WorkerCollator(
        source,
        workers=config.data.num_workers,
        seq_length=config.train.seq_length,
        with_patches=True,
    )


def build_batch_sampler(config: Config, collator: Collator) -> PackedBatchSampler:
    """Windows of numbered samples."""
    size = config.data.packing_window
    return PackedBatchSampler(
        lambda number: collator.measure(range(number * size, (number + 1) * size)),
        count=config.train.global_batch_size,
        window=size,
        seq_length=config.train.seq_length,
        packing=config.data.packing,
    )


def _stream_loader(
    config: Config, source: FilesSource, collator: Collator, groups: Groups, staging: Staging
) -> RankLoader:
    """Each replica reads a share of its own, and knows nothing of the others'."""
    at, dims, data, train = groups.coords, groups.dims, config.data, config.train
    streams = {
        number: open_stream(
            each, run_dir=Path(config.run.run_dir), rank=at.dp, world=dims.dp, seed=train.seed, shuffle=data.shuffle
        )
        for number, each in enumerate(data.datasets)
        if is_stream(each)
    }
    sampler = StreamBatchSampler(
        StreamReader(source, streams, rank=at.dp, ranks=dims.dp),
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
    )


def _loader(config: Config, sampler: BatchSampler, collator: Collator, groups: Groups, staging: Staging) -> RankLoader:
    return RankLoader(
        sampler,
        collator,
        dp_rank=groups.coords.dp,
        dp_size=groups.dims.dp,
        micro_batch_size=config.train.micro_batch_size,
        global_batch_size=config.train.global_batch_size,
        balance=config.data.balance,
        stage=staging,
    )
