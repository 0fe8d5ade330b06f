"""Scale a recipe's learning-rate schedule to the number of iterations that the user chose."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megavlm.config.fields import value_at, with_values
from megavlm.config.schema import Config

Path = tuple[str, ...]

_LENGTH: Path = ("train", "train_iters")
_STYLE: Path = ("optimizer", "lr_decay_style")
_WSD: Path = ("optimizer", "lr_wsd_decay_iters")
# Options counted in iterations, with the lower bound of each.
_SCHEDULES: Mapping[Path, int] = {("optimizer", "lr_warmup_iters"): 0, ("optimizer", "lr_decay_iters"): 1, _WSD: 1}


def fitted(recipe: Config, given: Mapping[Path, Any]) -> dict[Path, Any]:
    """Return the schedule options of a recipe, scaled to the values that the user gave.

    If the user gave a number of iterations, warm-up and decay keep their fraction of the run, rounded down, unless they
    were given too. The length of the WSD decay is unset if the user chose another decay style.
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
    """Return the recipe with the user's values and its schedule scaled to them."""
    return with_values(recipe, {**fitted(recipe, given), **given})
