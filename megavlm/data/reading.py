"""How a run's data is read: which composer, which maker, which ranks."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch

from megavlm.config.data_source import data_source
from megavlm.config.schema import Config
from megavlm.data.composer import Composer, InOrder, Packed
from megavlm.data.feed import Exchange, Feed
from megavlm.data.loader import Loader
from megavlm.data.making import InProcesses, InThread, Maker
from megavlm.data.source import Source, build_source
from megavlm.parallel.groups import Groups


def build_feed(config: Config, source: Source, groups: Groups, *, device: torch.device, sees: bool) -> Feed:
    """The data of a run on this rank; `sees` where the rank needs pixels."""
    if data_source(config) != "files":
        in_order = InOrder(count=config.train.global_batch_size)
        in_thread = InThread(source, seq_length=config.train.seq_length, with_patches=sees)
        return Feed(_loader(config, in_order, in_thread, groups))
    exchange = Exchange(
        replica=groups.collection.mp,
        seers=groups.tp if sees else None,
        device=device,
        patch_dim=source.patch_dim,
    )
    if not exchange.reads:
        return Feed(None, exchange=exchange)
    maker = file_maker(config, source)
    return Feed(_loader(config, file_composer(config, maker), maker, groups), exchange=exchange)


def file_maker(config: Config, source: Source) -> Maker:
    """Reads in `--num-workers` processes, or in the loader's thread."""
    if not config.data.num_workers:
        return InThread(source, seq_length=config.train.seq_length, with_patches=True)
    return InProcesses(
        partial(build_source, config, run_dir=Path(config.train.run_dir)),
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


def _loader(config: Config, composer: Composer, maker: Maker, groups: Groups) -> Loader:
    return Loader(
        composer,
        maker,
        dp_rank=groups.at.dp,
        dp_size=groups.dims.dp,
        micro_batch_size=config.train.micro_batch_size,
        global_batch_size=config.train.global_batch_size,
        balance=config.data.balance,
    )
