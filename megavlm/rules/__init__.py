"""The table of options, and rules between options: defaults that depend on other options, and checks of conflicts.

A rule yields error messages, which name the options and the remedy. Only the first message is read. So a rule may
assume that its earlier checks and the rules before it (`check.py`) hold.
"""

from collections.abc import Callable, Iterable, Iterator

from megavlm.config.schema import Config

Rule = Callable[[Config], Iterator[str]]
WorldRule = Callable[[Config, int], Iterator[str]]


def first(rules: Iterable[Callable[..., Iterator[str]]], *arguments: object) -> str | None:
    """Return the first error message that the rules yield for these arguments; None if all rules hold."""
    return next((line for rule in rules for line in rule(*arguments)), None)
