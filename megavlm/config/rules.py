"""Validation of a configuration: each rule is a small function that returns an error message or None.

A message is one line that names the options and the remedy. Rules run in order, and a rule may assume that those before
it hold. Ranges of single options come first, so that no rule divides by zero. The planner validates `--pipeline-cuts`.
"""

from __future__ import annotations

from collections.abc import Iterator

from megavlm.config.effects import options_have_an_effect
from megavlm.config.layout_rules import LAYOUT_RULES, WORLD_RULES
from megavlm.config.model_rules import MODEL_RULES
from megavlm.config.precision_rules import PRECISION_RULES
from megavlm.config.ranges import out_of_range
from megavlm.config.run_rules import RUN_RULES
from megavlm.config.schema import Config
from megavlm.errors import UserError

RULES = (*MODEL_RULES, *LAYOUT_RULES, *PRECISION_RULES, *RUN_RULES, options_have_an_effect)


def check(config: Config, *, world: int) -> None:
    """Raise UserError for the first rule that a configuration violates on `world` processes."""
    assert world >= 1, "a run has at least one process"
    for complaint in _complaints(config, world):
        raise UserError(complaint)


def _complaints(config: Config, world: int) -> Iterator[str]:
    yield from out_of_range(config)
    for rule in RULES:
        if complaint := rule(config):
            yield complaint
    for world_rule in WORLD_RULES:
        if complaint := world_rule(config, world):
            yield complaint
