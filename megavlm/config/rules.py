"""Validation of a configuration: each rule is a small function that returns an error message or None.

A message is one line that names the options and the remedy. Rules run in order, and a rule may assume that those before
it hold. Ranges of single options come first, so that no rule divides by zero. The planner validates `--pipeline-cuts`.
"""

from __future__ import annotations

from collections.abc import Iterator

from megavlm.config.effects import options_have_an_effect
from megavlm.config.fields import options, value_at
from megavlm.config.layout_rules import LAYOUT_RULES, WORLD_RULES
from megavlm.config.model_rules import MODEL_RULES
from megavlm.config.objective_rules import OBJECTIVE_RULES
from megavlm.config.precision_rules import PRECISION_RULES
from megavlm.config.run_rules import RUN_RULES
from megavlm.config.schema import Config
from megavlm.config.start_defaults import with_start_defaults
from megavlm.errors import UserError

RULES = (
    *MODEL_RULES,
    *OBJECTIVE_RULES,
    *LAYOUT_RULES,
    *PRECISION_RULES,
    *RUN_RULES,
    options_have_an_effect,
)


def check(config: Config, *, world: int) -> None:
    """Raise UserError for the first rule that a configuration violates on `world` processes."""
    assert world >= 1, "a run has at least one process"
    for complaint in _complaints(config, world):
        raise UserError(complaint)


def usable_world(config: Config, launched: int) -> int:
    """Return how many of `launched` processes train: all, or with `--spare-ranks` the most that layout and batch allow.

    All, too, if no number will do or a value is out of its range, so that `check` says what is wrong.
    """
    if not config.parallel.spare_ranks or any(out_of_range(config)):
        return launched
    config = with_start_defaults(config)
    numbers = range(launched, 0, -1)
    return next((world for world in numbers if not any(rule(config, world) for rule in WORLD_RULES)), launched)


def out_of_range(config: Config) -> Iterator[str]:
    """Yield a message for each value outside the range of its option, in the order of the schema."""
    for option in options():
        if option.valid is None:
            continue
        value = value_at(config, option.path)
        for number in value if option.kind.many else (value,):
            if number is not None and not option.valid.holds(number):
                yield f"{option.name} {number} must be {option.valid.words}"


def _complaints(config: Config, world: int) -> Iterator[str]:
    yield from out_of_range(config)
    config = with_start_defaults(config)
    for rule in RULES:
        if complaint := rule(config):
            yield complaint
    for world_rule in WORLD_RULES:
        if complaint := world_rule(config, world):
            yield complaint
