"""Compute the full configuration of a run from its command line and its number of processes. No torch at import."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from megavlm.command_line.parsing import parse, typed_options
from megavlm.config.derived import starts_from
from megavlm.config.option import data_kind
from megavlm.config.schema import Config, ParallelConfig
from megavlm.errors import UserError
from megavlm.rules.check import check, usable_world
from megavlm.rules.defaults import is_set, resolve
from megavlm.storage.cache import is_here


def configured(argv: Sequence[str], *, world: int | None) -> Config:
    """Return the configuration with which `world` processes would train; with None, plan no layout and check all but
    the layout. Raises UserError as a run would.
    """
    if world is None:
        config = _sized(argv)
        check(replace(config, parallel=ParallelConfig()), world=1)
        return config
    config, world = _laid_out(_sized(argv), world, argv)
    check(config, world=world)
    return config


def to_train(argv: Sequence[str], *, launched: int) -> tuple[Config, int]:
    """Return the configuration of a run, with its weights downloaded, and how many of the launched processes train. A
    dry run downloads no weights, assumes --world-size processes if one was launched, and is checked when it prints its
    plan. Raises UserError.
    """
    config = _sized(argv)
    if config.run.dry_run and launched == 1:
        launched = config.run.world_size or 1
    config, world = _laid_out(with_model(config, weights=not config.run.dry_run), launched, argv)
    if not config.run.dry_run:
        check(config, world=world)
    return config, world


def _sized(argv: Sequence[str]) -> Config:
    sizes = partial(with_model, weights=False)
    return sizes(parse(argv, complete=sizes))


def _laid_out(config: Config, launched: int, argv: Sequence[str]) -> tuple[Config, int]:
    world = usable_world(config, launched)
    return with_plan(config, argv, world=world), world


def with_model(config: Config, *, weights: bool = True) -> Config:
    """Return the configuration with the model of its Hugging Face folders, if it names any.

    Without `weights`, for commands that do not train, the model's sizes are enough: those of config.json, or of
    --published-model if the folders are not on this machine. Raises UserError.
    """
    places = starts_from(config)
    if not places:
        return config
    from megavlm.checkpoint.hf.pretrained import with_pretrained_model

    sizes_known = config.model.published is not None
    if sizes_known and not weights and not all(map(is_here, places.values())):
        return config
    try:
        return with_pretrained_model(config, weights=weights)
    except UserError as error:
        if not sizes_known or all(map(is_here, places.values())):
            raise
        without = " ".join(f"{option} none" for option in places)
        raise UserError(f"{error}; {without} begins with random weights of that size") from error


def with_vocabulary(config: Config, *, otherwise: int) -> tuple[Config, str]:
    """Return the resolved configuration, with the vocabulary size of its tokenizer unless it has one, and "". If no
    tokenizer can be read here, the size is `otherwise`, as for synthetic samples, and the reason comes second.
    """
    found, unknown = otherwise, ""
    if not is_set(config.model.language, "vocab_size") and data_kind(config) != "synthetic":
        try:
            from megavlm.train.build_source import vocab_size_of

            found = vocab_size_of(config)
        except ModuleNotFoundError as error:
            unknown = f"{error.name} is not installed"
        except UserError as error:
            unknown = str(error)
    return resolve(config, vocab_size=found), unknown


def with_plan(config: Config, argv: Sequence[str], *, world: int) -> Config:
    """Return the configuration with the planner's layout if `--plan auto`, and with degrees that the command line
    names as they are; all ranks compute the same layout.
    """
    if config.placement.plan != "auto":
        return config
    from megavlm.planner.auto import planned
    from megavlm.train.build_source import vocab_size_of

    return planned(config, world, vocab_size=vocab_size_of(config), typed=typed_options(argv))
