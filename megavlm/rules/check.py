"""Validate a configuration: ranges, then rules in their order, then options without an effect.

An option has an effect only if the options that it declares (`option(needs=...)`) are set. If the user sets an option
without effect, an error names the missing option; if only a recipe sets it, it is reset to its default.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import fields

from megavlm.arch.connector import connector_of
from megavlm.config.option import Needs
from megavlm.config.registry import registered
from megavlm.config.schema import Config, ProjectorConfig
from megavlm.errors import UserError
from megavlm.rules import Rule, first
from megavlm.rules.defaults import is_start_default, with_start_defaults
from megavlm.rules.fields import Option, options, value_at, with_values
from megavlm.rules.layout_rules import LAYOUT_RULES, WORLD_RULES
from megavlm.rules.model_rules import MODEL_RULES
from megavlm.rules.precision_rules import PRECISION_RULES
from megavlm.rules.run_rules import RUN_RULES
from megavlm.rules.training_rules import TRAINING_RULES

# Defaults that mean "off": scripts may set an unused option to them (`--ep 1`).
_OFF = (None, False, 0, 1, (), "none")


def idle(config: Config, *, typed: Collection[tuple[str, ...]] = ()) -> Iterator[tuple[Option, Needs]]:
    """Yield (option, unmet need) for the options that are set but have no effect in this configuration. An option is
    set if it differs from its default, or if its path was `typed` and its default is not "off": `--lora-alpha 16`
    without a rank is meant to train adapters.
    """
    of_names = _of_names(config)
    for option in options():
        differs = value_at(config, option.path) != option.default and not is_start_default(config, option)
        if differs or (option.path in typed and option.default not in _OFF):
            further = [of_names[option.key]] if option.key in of_names else []
            yield from ((option, needs) for needs in (*option.needs, *further) if not needs.there(config))


def _of_names(config: Config) -> dict[str, Needs]:
    """Return the unmet needs, by key, of options of registered entries that no option selects, and of projector options
    that the selected connector does not read.
    """
    found: dict[str, Needs] = {}
    for chooser in (option for option in options() if option.point is not None):
        said = value_at(config, chooser.path)
        for name in registered(str(chooser.point)):
            if name in said if chooser.kind.many else name == said:
                continue
            needs = Needs(_never, f"without {name}", f"use {chooser.flag} {name}")
            inside = (each for each in options() if each.path[-2] == name and each.section.startswith(chooser.section))
            found |= {each.key: needs for each in inside}
    connector = connector_of(config.model.projector)
    ignored = {field.name for field in fields(ProjectorConfig)} - {"kind", "connectors", *connector.reads}
    needs = Needs(_never, f"with --projector-kind {connector.name}", "use another kind")
    return found | {f"model.projector.{name}": needs for name in ignored}


def _never(config: Config) -> bool:
    return False


def options_have_an_effect(config: Config, *, typed: Collection[tuple[str, ...]] = ()) -> Iterator[str]:
    for option, needs in idle(config, typed=typed):
        name = option.name
        if value_at(config, option.path) is False:
            name = option.negations[0] if option.flag else f"{option.key}=false"
        yield f"{name} has no effect {needs.lacking}: {needs.remedy}, or leave {name} out"


def without_idle(config: Config, given: Collection[tuple[str, ...]]) -> Config:
    """Return the configuration with idle options at their defaults, except those whose paths are `given`."""
    unasked = {option.path: option.default for option, _ in idle(config) if option.path not in given}
    return with_values(config, unasked)


RULES: tuple[Rule, ...] = (
    *MODEL_RULES,
    *LAYOUT_RULES,
    *PRECISION_RULES,
    *TRAINING_RULES,
    *RUN_RULES,
    options_have_an_effect,
)


def check(config: Config, *, world: int) -> None:
    """Raise UserError for the first rule that a configuration violates on `world` processes."""
    assert world >= 1, "a run has at least one process"
    complaint = next(out_of_range(config), None)
    config = with_start_defaults(config) if complaint is None else config
    if complaint := complaint or first(RULES, config) or first(WORLD_RULES, config, world):
        raise UserError(complaint)


def usable_world(config: Config, launched: int) -> int:
    """Return how many of `launched` processes train: all, or with `--spare-ranks` the most that layout and batch allow.

    If no number is possible or a value is out of its range, return `launched`, so that `check` reports the error.
    """
    if not config.parallel.spare_ranks or any(out_of_range(config)):
        return launched
    config = with_start_defaults(config)
    numbers = range(launched, 0, -1)
    return next((world for world in numbers if first(WORLD_RULES, config, world) is None), launched)


def out_of_range(config: Config) -> Iterator[str]:
    """Yield a message for each value outside the range of its option, in the order of the schema."""
    for option in options():
        if option.valid is None:
            continue
        value = value_at(config, option.path)
        for number in value if option.kind.many else (value,):
            if number is not None and not option.valid.holds(number):
                yield f"{option.name} {number} must be {option.valid.words}"
