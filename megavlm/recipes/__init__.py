"""Predefined configurations. Recipe `x` is the function `x()` in `megavlm.recipes.x`, which returns a Config.

A module is imported only when its recipe is used, so that its dependencies do not affect other runs.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

from megavlm.config.schema import Config
from megavlm.config.words import did_you_mean, plain
from megavlm.errors import UserError


def _from_module(name: str) -> Callable[[], Config]:
    def build() -> Config:
        config = getattr(import_module(f"megavlm.recipes.{name}"), name)()
        assert isinstance(config, Config), f"recipe {name} must return a Config"
        return config

    return build


RECIPES: dict[str, Callable[[], Config]] = {name: _from_module(name) for name in ("demo",)}


def recipe(name: str) -> Config:
    """Return the configuration of a recipe. Raises UserError, with a suggestion, for an unknown name."""
    if name not in RECIPES:
        hint = did_you_mean(name, RECIPES) or f": choose one of {', '.join(RECIPES)}"
        raise UserError(f"unknown recipe {plain(name)}{hint}")
    return RECIPES[name]()
