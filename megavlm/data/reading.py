"""How a run's data is read: which composer, which maker, which ranks."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

from megavlm.config.data_source import data_source
from megavlm.config.schema import Config
from megavlm.data.composer import Composer, InOrder, Packed
from megavlm.data.feed import Exchange, Feed, Shares
from megavlm.data.files import FilesSource
from megavlm.data.loader import Loader
from megavlm.data.making import InProcesses, InThread, Maker
from megavlm.data.records import is_stream, open_records, open_stream, prepare_stream
from megavlm.data.source import Source
from megavlm.data.staging import Staging
from megavlm.data.streaming import MOST_HELD, Forward, ForwardPacked
from megavlm.parallel.groups import Groups


def prepare_data(config: Config) -> None:
    """Look at every data set once, before all ranks rely on it; index tars that nobody has. One rank calls it.

    Raises UserError for one that cannot be read.
    """
    if data_source(config) != "files":
        return
    for source in config.data.sources:
        if is_stream(source):
            prepare_stream(source, run_dir=Path(config.train.run_dir), log=print)
        else:
            open_records(source)


def build_feed(
    config: Config,
    source: Source,
    groups: Groups,
    *,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    seers: dist.ProcessGroup | None,
    shares: Shares | None = None,
) -> Feed:
    """The data of a run on this rank; `seers` are the ranks of its replica that need pixels, None on another rank.
    `shares` tells which of them each rank needs, if not all. Patches come in the type `dtype`.
    """
    staging = Staging(dtype, device)
    if data_source(config) != "files":
        in_order = InOrder(count=config.train.global_batch_size)
        in_thread = InThread(source, seq_length=config.train.seq_length, with_patches=seers is not None)
        return Feed(_loader(config, in_order, in_thread, groups, staging))
    exchange = Exchange(
        replica=groups.collection.mp,
        seers=seers,
        device=device,
        patch_dim=source.patch_dim,
        shares=shares,
    )
    assert isinstance(source, FilesSource)
    if exchange.reads and groups.at.dp == 0:
        for warning in source.warnings():
            print(f"warning: {warning}", flush=True)
    forward = any(is_stream(each) for each in config.data.sources)
    replicas = groups.dp if forward else None
    loader = None
    if exchange.reads:
        maker = file_maker(config, source)
        loader = (
            _forward_loader(config, source, maker, groups, staging)
            if forward
            else _loader(config, file_composer(config, maker), maker, groups, staging)
        )
    return Feed(loader, exchange=exchange, replicas=replicas)


def file_maker(config: Config, source: Source) -> Maker:
    """Reads in `--num-workers` processes, or in the loader's thread."""
    if not config.data.num_workers:
        return InThread(source, seq_length=config.train.seq_length, with_patches=True)
    return InProcesses(
        source,
        workers=config.data.num_workers,
        seq_length=config.train.seq_length,
        with_patches=True,
    )


def file_composer(config: Config, maker: Maker) -> Packed:
    """Windows of numbered samples."""
    size = config.data.packing_window
    return Packed(
        lambda number: maker.measure(range(number * size, (number + 1) * size)),
        count=config.train.global_batch_size,
        window=size,
        seq_length=config.train.seq_length,
        packing=config.data.packing,
    )


def _forward_loader(config: Config, source: FilesSource, maker: Maker, groups: Groups, staging: Staging) -> Loader:
    """Each replica reads a share of its own, and knows nothing of the others'."""
    at, dims, data, train = groups.at, groups.dims, config.data, config.train
    streams = {
        number: open_stream(
            each, run_dir=Path(train.run_dir), rank=at.dp, world=dims.dp, seed=train.seed, shuffle=data.shuffle
        )
        for number, each in enumerate(data.sources)
        if is_stream(each)
    }
    composer = ForwardPacked(
        Forward(source, streams, rank=at.dp, ranks=dims.dp),
        maker,
        count=train.global_batch_size // dims.dp,
        window=min(data.packing_window, MOST_HELD),
        seq_length=train.seq_length,
        packing=data.packing,
    )
    return Loader(
        composer,
        maker,
        dp_rank=0,
        dp_size=1,
        micro_batch_size=train.micro_batch_size,
        global_batch_size=train.global_batch_size // dims.dp,
        balance=data.balance,
        alone=True,
        stage=staging,
    )


def _loader(config: Config, composer: Composer, maker: Maker, groups: Groups, staging: Staging) -> Loader:
    return Loader(
        composer,
        maker,
        dp_rank=groups.at.dp,
        dp_size=groups.dims.dp,
        micro_batch_size=config.train.micro_batch_size,
        global_batch_size=config.train.global_batch_size,
        balance=config.data.balance,
        stage=staging,
    )
