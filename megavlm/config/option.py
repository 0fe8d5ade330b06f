"""How an option of a run is declared: a dataclass field with a help line, aliases and a group of `--help`."""

from __future__ import annotations

from dataclasses import field
from typing import Any

# Groups of `--help`, in its order.
MODEL = "model and weights"
DATA = "data"
LAYOUT = "layout"
TRAINING = "training"
PRECISION = "precision and memory"
FILES = "checkpoints and logging"
COMMON_GROUPS = (MODEL, DATA, LAYOUT, TRAINING, PRECISION, FILES)


def option(default: Any, help: str, *aliases: str, flag: str | None = None, common: str | None = None) -> Any:
    """Return a dataclass field with its help line, short flag aliases (`"--tp"`) and group in `--help`, if any.

    `flag` replaces the flag that follows from the field's name.
    """
    return field(default=default, metadata={"help": help, "aliases": aliases, "own_flag": flag, "common": common})
