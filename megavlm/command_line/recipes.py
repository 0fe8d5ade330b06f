"""Predefined configurations: files of options in `demos/`, in the format of `--config`.

The demos train a model that learns to read handwritten digits in a few minutes on two CPU cores.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from megavlm.config.messages import did_you_mean, plain
from megavlm.config.schema import Config
from megavlm.errors import UserError
from megavlm.rules.fields import with_values

# The files of each recipe, of which a later one overrides those before.
RECIPES = {"demo": ("demo",), "demo-embed": ("demo", "demo-embed"), "demo-moe": ("demo", "demo-moe")}


def recipe(name: str, *, train_iters: int | None = None) -> Config:
    """Return the configuration of a recipe, with `train_iters` in place of its own length if given.

    Warm-up and decay are then scaled to the new length, rounded down. Raises UserError, with a suggestion, for an
    unknown name.
    """
    if name not in RECIPES:
        hint = did_you_mean(name, RECIPES) or f": choose one of {', '.join(RECIPES)}"
        raise UserError(f"unknown recipe {plain(name)}{hint}")
    from megavlm.rules.load import values_in_file  # YAML is imported only where it is used

    config = Config()
    for file in RECIPES[name]:
        config = with_values(config, values_in_file(Path(__file__).with_name("demos") / f"{file}.yaml"))
    if train_iters is None:
        return config
    # Options counted in iterations, with the lower bound of each.
    schedule = {
        option: max(least, length * train_iters // config.train.train_iters)
        for option, least in (("lr_warmup_iters", 0), ("lr_decay_iters", 1), ("lr_wsd_decay_iters", 1))
        if (length := getattr(config.optimizer, option)) is not None
    }
    return replace(config, optimizer=replace(config.optimizer, **schedule))
