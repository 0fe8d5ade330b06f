"""Declaration of an option as a dataclass field: help, flags, range of valid values, and needed options."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

if TYPE_CHECKING:
    from megavlm.config.schema import Config

# Groups of `--help`, in its order.
MODEL = "model and weights"
DATA = "data"
LAYOUT = "layout"
TRAINING = "training"
PRECISION = "precision and memory"
FILES = "checkpoints and logging"
# Instead of a flag: only files and `--set` can set the option.
KEY_ONLY = ""
COMMON_GROUPS = (MODEL, DATA, LAYOUT, TRAINING, PRECISION, FILES)


@dataclass(frozen=True)
class Valid:
    """Range of a number: `holds(value)` is true for valid values; messages say "must be " + `words`."""

    words: str
    holds: Callable[[float], bool]


@dataclass(frozen=True)
class Needs:
    """Condition for an option's effect: `there(config)` is true if it has one; else messages say "--option has no
    effect " + `lacking`, and the `remedy`.
    """

    there: Callable[[Config], bool]
    lacking: str
    remedy: str


AT_LEAST_0 = Valid("at least 0", lambda value: value >= 0)
AT_LEAST_1 = Valid("at least 1", lambda value: value >= 1)
POSITIVE = Valid("greater than 0", lambda value: value > 0)
BELOW_1 = Valid("at least 0 and less than 1", lambda value: 0 <= value < 1)
BELOW_HALF = Valid("at least 0 and less than 0.5", lambda value: 0 <= value < 0.5)
FRACTION = Valid("between 0 and 1", lambda value: 0 <= value <= 1)
SHARE = Valid("greater than 0 and at most 1", lambda value: 0 < value <= 1)

# Types of options with the ranges that most numbers have; others are given to `option` as `valid`.
Count = Annotated[int, AT_LEAST_1]
Natural = Annotated[int, AT_LEAST_0]
Positive = Annotated[float, POSITIVE]
NotNegative = Annotated[float, AT_LEAST_0]
Below1 = Annotated[float, BELOW_1]


def option(
    default: Any,
    help: str,
    *aliases: str,
    flag: str | None = None,
    common: str | None = None,
    valid: Valid | None = None,
    needs: Needs | tuple[Needs, ...] = (),
    point: str | None = None,
) -> Any:
    """Return a dataclass field with its help line, short flag aliases (`"--tp"`) and group in `--help`, if any.

    `flag` replaces the flag that follows from the field's name; `KEY_ONLY`: no flag. `valid` is the range of a number
    whose type does not say it, as `Count` does; bounds that depend on other options are rules (`megavlm/rules`).
    `needs` are the conditions for the option's effect, in the order in which messages name them. An option with a
    `point` also accepts the names that are registered at this extension point (`registry.py`).
    """
    needs = needs if isinstance(needs, tuple) else (needs,)
    metadata = {
        "help": help,
        "aliases": aliases,
        "own_flag": flag,
        "common": common,
        "valid": valid,
        "needs": needs,
        "point": point,
    }
    return field(default=default, metadata=metadata)


def filled(section: Any, **defaults: Any) -> Any:
    """Return a section with its unset (None) fields at the given defaults; the section itself if all are set."""
    missing = {name: value for name, value in defaults.items() if getattr(section, name) is None}
    return replace(section, **missing) if missing else section


key_only = partial(option, flag=KEY_ONLY)


def data_kind(config: Config) -> str:
    """Return `--data` or its default, for code that runs before `resolve`."""
    given: str | None = config.data.kind
    return given if given is not None else "files" if config.data.datasets else "synthetic"


def has_validation(config: Config) -> bool:
    """Return whether a run has validation samples, whose loss it measures without training on them."""
    return bool(config.data.validation) or config.data.validation_split > 0 or data_kind(config) == "digits"


DATASETS = Needs(
    lambda config: data_kind(config) == "files", "without --datasets", "name your data sets with --datasets"
)
EXPERTS = Needs(lambda config: config.model.experts.num_experts > 0, "without experts", "add --num-experts 8")
VISION = Needs(
    lambda config: config.model.vision.num_layers > 0 or config.model.vision.encoder_free,
    "without a vision encoder",
    "set model.vision.num_layers",
)
COLOCATED = Needs(
    lambda config: config.placement.encoder == "colocated",
    "without a colocated encoder",
    "add --placement colocated",
)
