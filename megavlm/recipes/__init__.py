"""Predefined configurations. A recipe is a function that returns a Config.

Its learning-rate schedule is scaled to the number of iterations that a user gives. A module is imported only when
its recipe is used, so that its dependencies do not affect other runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from megavlm.config.fields import value_at, with_values
from megavlm.config.messages import did_you_mean, plain
from megavlm.config.schema import Config
from megavlm.errors import UserError

Path = tuple[str, ...]  # of an option: (section, field)

_LENGTH: Path = ("train", "train_iters")
_STYLE: Path = ("optimizer", "lr_decay_style")
_WSD: Path = ("optimizer", "lr_wsd_decay_iters")
# Options counted in iterations, with the lower bound of each.
_SCHEDULES: Mapping[Path, int] = {("optimizer", "lr_warmup_iters"): 0, ("optimizer", "lr_decay_iters"): 1, _WSD: 1}


def _from_module(module: str, name: str) -> Callable[[], Config]:
    def build() -> Config:
        config = getattr(import_module(module), name)()
        assert isinstance(config, Config), f"recipe {name} must return a Config"
        return config

    return build


RECIPES: dict[str, Callable[[], Config]] = {
    "demo": _from_module("megavlm.demo.recipe", "demo"),
    "demo-embed": _from_module("megavlm.demo.recipe", "demo_embed"),
    "demo-moe": _from_module("megavlm.demo.recipe", "demo_moe"),
}


def recipe(name: str) -> Config:
    """Return the configuration of a recipe. Raises UserError, with a suggestion, for an unknown name."""
    if name not in RECIPES:
        hint = did_you_mean(name, RECIPES) or f": choose one of {', '.join(RECIPES)}"
        raise UserError(f"unknown recipe {plain(name)}{hint}")
    return RECIPES[name]()


def _scaled_schedule(recipe: Config, given: Mapping[Path, Any]) -> dict[Path, Any]:
    """Return the schedule options of a recipe, scaled to the values that the user gave.

    If the user gave a number of iterations, warm-up and decay keep their fraction of the run, rounded down, unless they
    were given too. The length of the WSD decay is unset if the user chose another decay style.
    """
    values: dict[Path, Any] = {}
    before, now = value_at(recipe, _LENGTH), given.get(_LENGTH)
    if before is not None and now is not None:
        for path, least in _SCHEDULES.items():
            if (length := value_at(recipe, path)) is not None:
                values[path] = max(least, length * now // before)
    if given.get(_STYLE, "WSD") != "WSD":
        values[_WSD] = None
    return {path: value for path, value in values.items() if path not in given}


def with_user_values(recipe: Config, given: Mapping[Path, Any]) -> Config:
    """Return the recipe with the user's values and its schedule scaled to them."""
    return with_values(recipe, {**_scaled_schedule(recipe, given), **given})
