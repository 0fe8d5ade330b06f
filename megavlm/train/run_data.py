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
from megavlm.data.costs import ImageAssignment
from megavlm.data.loaders import Loaders, build_loaders
from megavlm.data.records import data_identity
from megavlm.data.source import HeldOutPrompt, Source
from megavlm.data.survey import RunLength, data_table, run_length, samples_line, validation_line
from megavlm.data.types import HeldOut
from megavlm.model.specs import DTYPES
from megavlm.parallel.groups import Groups
from megavlm.parallel.rendezvous import from_rank_0, on_rank_0
from megavlm.rules.training_rules import with_train_iters
from megavlm.storage.cache import DATASETS, local_path


@dataclass(frozen=True)
class RunData:
    """The data of a run on this rank."""

    loaders: Loaders
    prompts: tuple[HeldOutPrompt, ...]  # of --sample-interval, on all ranks; they stay in memory
    identity: dict[str, Any]  # what a place in the data depends on


def prepare(config: Config, source: Source, plan: Plan, groups: Groups, backend: Backend) -> tuple[Config, RunData]:
    """Return the configuration with the run's length in steps, and the data.

    Rank 0 prepares them and says what there is; the others wait for it.
    """
    rank = dist.get_rank()
    for each in config.data.datasets:  # each machine copies what is in a store before one waits for another
        local_path(each.path, DATASETS)
    if config.train.epochs is not None:
        length = from_rank_0(partial(run_length, config, source), RunLength(0, 0, None))
        if rank == 0:
            print(length.line(config), flush=True)
        config = with_train_iters(config, length.iterations)
    if source.is_read:
        on_rank_0(lambda: print(data_table(config, source), flush=True))
    identity = from_rank_0(partial(data_identity, config), dict[str, Any]())
    validation, prompts = tuple[HeldOut, ...](), tuple[HeldOutPrompt, ...]()
    if has_validation(config):
        validation = from_rank_0(partial(source.validation_samples, config), validation)
        if rank == 0:
            print(validation_line(source.validation_names, validation), flush=True)
        if config.evaluation.sample_interval:
            choose = partial(source.prompts, config, validation)
            prompts = from_rank_0(choose, prompts) if source.is_read else choose()
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
        validation=validation,
    )
    return config, RunData(loaders, prompts, identity)


def _vision_group(plan: Plan, groups: Groups) -> dist.ProcessGroup | None:
    """Return the group of this replica's ranks that encode images; None on a rank that encodes none."""
    if plan.encoder:
        return groups.replica
    return groups.collection.tp_cp if plan.owner_of(PATCH_EMBED) == groups.coords.pp else None
