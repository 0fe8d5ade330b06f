"""How an option of a run is declared: a dataclass field with a help line, aliases and a group of `--help`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

# Groups of `--help`, in its order.
MODEL = "model and weights"
DATA = "data"
LAYOUT = "layout"
TRAINING = "training"
PRECISION = "precision and memory"
FILES = "checkpoints and logging"
COMMON_GROUPS = (MODEL, DATA, LAYOUT, TRAINING, PRECISION, FILES)


@dataclass(frozen=True)
class Valid:
    """`holds(value)` is true for valid values of a number; messages say "must be " + `words`."""

    words: str
    holds: Callable[[float], bool]


AT_LEAST_0 = Valid("at least 0", lambda value: value >= 0)
AT_LEAST_1 = Valid("at least 1", lambda value: value >= 1)
POSITIVE = Valid("greater than 0", lambda value: value > 0)
FRACTION = Valid("between 0 and 1", lambda value: 0 <= value <= 1)
BELOW_1 = Valid("at least 0 and less than 1", lambda value: 0 <= value < 1)
SHARE = Valid("greater than 0 and at most 1", lambda value: 0 < value <= 1)


def option(
    default: Any,
    help: str,
    *aliases: str,
    flag: str | None = None,
    common: str | None = None,
    valid: Valid | None = None,
    point: str | None = None,
) -> Any:
    """Return a dataclass field with its help line, short flag aliases (`"--tp"`) and group in `--help`, if any.

    `flag` replaces the flag that follows from the field's name. `valid` is the range of a number; bounds that depend on
    other options are rules (`rules.py`). An option with a `point` may also say any name that is registered there
    (`registry.py`).
    """
    metadata = {"help": help, "aliases": aliases, "own_flag": flag, "common": common, "valid": valid, "point": point}
    return field(default=default, metadata=metadata)
