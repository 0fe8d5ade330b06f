"""Find the configuration that a command line of pretrain_vlm.py gives a number of processes. No torch at import."""

from __future__ import annotations

from collections.abc import Sequence

from megavlm.config.cli import parse
from megavlm.config.rules import check, usable_world
from megavlm.config.schema import Config


def configured(argv: Sequence[str], *, world: int) -> Config:
    """Return the configuration with which `world` processes would train. Raises UserError as they would."""
    config = with_model(parse(argv, complete=with_model))
    world = usable_world(config, world)
    config = with_plan(config, world=world)
    check(config, world=world)
    return config


def with_model(config: Config) -> Config:
    """Return the configuration with the model of its Hugging Face folders, if it names any."""
    options = config.checkpoint
    if not any((options.init_from, options.vision_from, options.language_from, options.projector_from)):
        return config
    from megavlm.checkpoint.hf.pretrained import with_pretrained_model

    return with_pretrained_model(config)


def with_plan(config: Config, *, world: int) -> Config:
    """Return the configuration with the planner's layout if `--plan auto`; all ranks compute the same."""
    if config.placement.plan != "auto":
        return config
    from megavlm.planner.auto import planned
    from megavlm.train.source import vocab_size_of

    return planned(config, world, vocab_size=vocab_size_of(config))
