"""Prepare a run's data on this rank: length in steps, loaders, held-out prompts and reference log-probabilities."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megavlm.arch.dims import Dims
from megavlm.arch.layers import AUDIO_EMBED, PATCH_EMBED
from megavlm.arch.plan import Plan
from megavlm.backend import Backend
from megavlm.config.option import has_validation
from megavlm.config.schema import Config
from megavlm.data.costs import ImageAssignment
from megavlm.data.loaders import Loaders, References, build_loaders
from megavlm.data.records import data_identity
from megavlm.data.source import HeldOutPrompt, Source
from megavlm.data.survey import RunLength, data_table, run_length, samples_line, validation_line
from megavlm.data.types import ID, HeldOut
from megavlm.errors import StoreLost, UserError
from megavlm.files import replace_file
from megavlm.model.specs import DTYPES
from megavlm.parallel.groups import Groups
from megavlm.parallel.rendezvous import barrier, from_rank_0, on_rank_0
from megavlm.rules.training_rules import with_train_iters
from megavlm.storage.cache import DATASETS, local_path
from megavlm.storage.store import Store, StoreError
from megavlm.storage.transfer import with_retries
from megavlm.train.build_source import build_source
from megavlm.train.engine import Engine

_LARGEST = 2**32  # bytes of reference log-probabilities: 268 million answers


@dataclass(frozen=True)
class RunData:
    """The data of a run on this rank."""

    loaders: Loaders
    prompts: tuple[HeldOutPrompt, ...]  # of --sample-interval, on all ranks; they stay in memory
    identity: dict[str, Any]  # what a place in the data depends on


def prepare(config: Config, source: Source, plan: Plan, groups: Groups, backend: Backend) -> tuple[Config, RunData]:
    """Return the configuration with the run's length in steps, and the data.

    Rank 0 prepares the data and prints a summary; the other ranks wait for it.
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
        audio_ranks=_audio_ranks(plan, groups.dims),
        validation=validation,
    )
    return config, RunData(loaders, prompts, identity)


def check_references(run_dir: Path, store: str | None) -> None:
    """Raise UserError if a resumed run lost its reference log-probabilities: only the initial weights give them.

    On a new disk they are copied from `store`, where the first start of the run has left them.
    """
    path = References(run_dir).path
    if not path.exists() and store is not None:
        with contextlib.suppress(StoreError):  # the message below says what to do
            replace_file(path, with_retries(lambda: Store.at(store).read(path.name, at_most=_LARGEST)))
    if not path.exists():
        raise UserError(f"{path} is missing, which the first start wrote: put it back, or begin a new run (--run-dir)")


def write_references(config: Config, plan: Plan, groups: Groups, backend: Backend, engine: Engine) -> None:
    """Write the log-probability of each answer in the data under the current model, also to `--checkpoint-dir`; every
    rank calls it. Raises StoreLost.

    The pass is a validation over all records, each read once. So no second model is ever in memory.
    """
    run_dir, data = Path(config.run.run_dir), config.data
    references = References(run_dir)
    on_rank_0(partial(references.path.unlink, missing_ok=True))
    every = (*data.datasets, *(each for each in data.validation if each not in data.datasets))
    asked = replace(
        config,
        data=replace(data, validation=every, validation_split=0.0, num_workers=0),
        evaluation=replace(config.evaluation, eval_iters=None, sample_interval=0),
        train=replace(config.train, epochs=None),
    )
    with contextlib.redirect_stdout(io.StringIO()):
        source = build_source(asked, run_dir=run_dir, rank=dist.get_rank(), barrier=barrier)
        loaders = prepare(asked, source, plan, groups, backend)[1].loaders
    known, last = dict[int, float](), False
    assert loaders.validation is not None
    try:
        with engine.evaluation():
            while not last:
                step = loaders.validation.next_step()
                last = step.last
                sums = engine.schedule.answers(step.batches)
                mine: list[tuple[int, float]] = []
                for batch, logs in zip(step.batches, sums, strict=False):
                    assert batch.text.members is not None
                    mine += zip(batch.text.members[:, ID].tolist(), logs.tolist(), strict=True)
                gathered: list[list[tuple[int, float]]] = [[] for _ in range(dist.get_world_size())]
                dist.gather_object(mine, gathered if dist.get_rank() == 0 else None)
                known |= dict(each for part in gathered for each in part)
    finally:
        loaders.training.close()
        loaders.validation.close()

    def write() -> None:
        references.write(known)
        if (store := config.checkpoint.checkpoint_dir) is not None:
            try:
                with_retries(lambda: Store.at(store).upload(references.path, references.path.name))
            except StoreError as error:
                raise StoreLost(f"--checkpoint-dir: {error}. Start again when the store answers") from error

    on_rank_0(write)


def _audio_ranks(plan: Plan, dims: Dims) -> Sequence[int]:
    """Return the numbers in a replica of the ranks that encode sounds: those of one pipeline stage, or none."""
    size = dims.tp * dims.cp
    stages = [number % dims.pp for number, chunk in enumerate(plan.chunks) if AUDIO_EMBED in chunk]
    return [rank for stage in stages for rank in range(stage * size, (stage + 1) * size)]


def _vision_group(plan: Plan, groups: Groups) -> dist.ProcessGroup | None:
    """Return the group of this replica's ranks that encode images; None on a rank that encodes none."""
    if plan.encoder:
        return groups.replica
    return groups.collection.tp_cp if groups.coords.pp == 0 and PATCH_EMBED in plan.chunks[0] else None
