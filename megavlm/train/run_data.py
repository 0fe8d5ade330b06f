"""Prepare the data of a run on this rank: its length, its loaders, and the prompts that it answers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch.distributed as dist

from megavlm.arch.layers import PATCH_EMBED
from megavlm.arch.plan import Plan
from megavlm.backend import Backend
from megavlm.config.option import has_validation
from megavlm.config.schema import Config
from megavlm.data.epochs import RunLength, prepare_data, run_length, windows_of
from megavlm.data.files import FilesSource
from megavlm.data.image_assignment import ImageAssignment
from megavlm.data.loaders import Loaders, build_loaders
from megavlm.data.prompts import choose_prompts, samples_line
from megavlm.data.records import data_identity
from megavlm.data.source import ComputedSource, HeldOutPrompt
from megavlm.data.summary import data_table
from megavlm.data.validation import ValidationSamples, validation_samples
from megavlm.model.specs import DTYPES
from megavlm.parallel.groups import Groups, from_rank_0, on_rank_0
from megavlm.rules.run_rules import with_train_iters


@dataclass(frozen=True)
class RunData:
    """The data of a run on this rank."""

    loaders: Loaders
    prompts: tuple[HeldOutPrompt, ...]  # of --sample-interval, on all ranks; they stay in memory
    identity: dict[str, Any]  # what a place in the data depends on


def prepare(
    config: Config, source: ComputedSource | FilesSource, plan: Plan, groups: Groups, backend: Backend
) -> tuple[Config, RunData]:
    """Return the configuration with the run's length in steps, and the data.

    Rank 0 prepares them and says what there is; the others wait for it.
    """
    rank = dist.get_rank()
    counts = from_rank_0(partial(prepare_data, config), tuple[int, ...]())
    epoch = sum(counts)
    if isinstance(source, FilesSource):
        source.stream_lengths = dict(enumerate(counts))
    config = _with_length(config, source, epoch, told=rank == 0)
    if isinstance(source, FilesSource):
        on_rank_0(partial(_tell_data, config, source))
    identity = from_rank_0(partial(data_identity, config), dict[str, Any]())
    validation, prompts = None, tuple[HeldOutPrompt, ...]()
    if has_validation(config):
        validation = from_rank_0(partial(validation_samples, config, source), ValidationSamples((), ()))
        if rank == 0:
            print(validation.line(), flush=True)
        if config.evaluation.sample_interval:
            choose = partial(choose_prompts, config, source, validation.samples)
            prompts = choose() if isinstance(source, ComputedSource) else from_rank_0(choose, prompts)
            if rank == 0:
                print(samples_line(config, len(prompts)), flush=True)
    loaders = build_loaders(
        config,
        source,
        groups,
        device=backend.device,
        dtype=DTYPES[config.precision.dtype],
        vision_group=_vision_group(plan, groups),
        assignment=ImageAssignment.of(config, ranks=groups.replica.size()) if plan.encoder else None,
        epoch=epoch,
        validation=validation,
    )
    return config, RunData(loaders, prompts, identity)


def _with_length(config: Config, source: ComputedSource | FilesSource, epoch: int, *, told: bool) -> Config:
    """Return the configuration with the number of iterations that rank 0 counts; the rank that is `told` prints it.

    Every rank calls it. `epoch` is the number of samples of an epoch.
    """
    if config.train.epochs is None:
        return config
    assert isinstance(source, FilesSource), "the configuration rules refuse this"

    def count() -> RunLength:
        return source.reads.wait(lambda: run_length(config, source, windows_of(config, epoch)))

    length = from_rank_0(count, RunLength(0, 0, None))
    if told:
        print(length.line(config), flush=True)
    return with_train_iters(config, length.iterations)


def _tell_data(config: Config, source: FilesSource) -> None:
    print(data_table(config, source), flush=True)


def _vision_group(plan: Plan, groups: Groups) -> dist.ProcessGroup | None:
    """Return the group of this replica's ranks that encode images; None on a rank that encodes none."""
    if plan.encoder:
        return groups.replica
    return groups.collection.tp_cp if plan.owner_of(PATCH_EMBED) == groups.coords.pp else None
