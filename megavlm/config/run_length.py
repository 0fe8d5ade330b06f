"""Schedules of a recipe as shares of its length: a shorter run of it warms up and decays in the same proportions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megavlm.config.fields import value_at, with_values
from megavlm.config.schema import Config

Path = tuple[str, ...]

_LENGTH: Path = ("train", "train_iters")
_STYLE: Path = ("optimizer", "lr_decay_style")
_WSD: Path = ("optimizer", "lr_wsd_decay_iters")
# Counted in iterations of the run; the least that each may become.
_SCHEDULES: Mapping[Path, int] = {("optimizer", "lr_warmup_iters"): 0, ("optimizer", "lr_decay_iters"): 1, _WSD: 1}


def fitted(recipe: Config, given: Mapping[Path, Any]) -> dict[Path, Any]:
    """Return the values that a recipe's schedules take beside the values that a user gave.

    Where the user gave another number of iterations, schedules that he did not give keep their share of the run,
    rounded down. A final decay that belongs to another style than the user's goes.
    """
    values: dict[Path, Any] = {}
    if _LENGTH in given:
        before, now = value_at(recipe, _LENGTH), given[_LENGTH]
        for path, least in _SCHEDULES.items():
            if (length := value_at(recipe, path)) is not None:
                values[path] = max(least, length * now // before)
    if given.get(_STYLE, "WSD") != "WSD":
        values[_WSD] = None
    return {path: value for path, value in values.items() if path not in given}


def run_of(recipe: Config, given: Mapping[Path, Any]) -> Config:
    """Return the recipe with what a user gave, its schedules fitted to that."""
    return with_values(recipe, {**fitted(recipe, given), **given})
