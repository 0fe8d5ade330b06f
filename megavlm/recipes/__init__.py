"""Named runs. A recipe `x` is the function `x` of the module `megavlm.recipes.x`: no arguments, a full Config.

Modules are imported when their recipe is asked for, so that what one of them needs is nobody else's concern.
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
    """The configuration of a named run. Raises UserError, with a suggestion, for a name that is not registered."""
    if name not in RECIPES:
        hint = did_you_mean(name, RECIPES) or f": choose one of {', '.join(RECIPES)}"
        raise UserError(f"unknown recipe {plain(name)}{hint}")
    return RECIPES[name]()
