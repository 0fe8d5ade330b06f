"""The table of options and all that relates options to one another: defaults that follow from others, and refusals.

A rule yields what is wrong with a configuration: lines that name the options and the remedy. Only the first is read, so
that a rule may assume that its lines before, and the rules before it (`check.py`), hold.
"""

from collections.abc import Callable, Iterable, Iterator

from megavlm.config.schema import Config

Rule = Callable[[Config], Iterator[str]]
WorldRule = Callable[[Config, int], Iterator[str]]


def first(rules: Iterable[Callable[..., Iterator[str]]], *arguments: object) -> str | None:
    """Return the first line that one of the rules has for its arguments; None if all hold."""
    return next((line for rule in rules for line in rule(*arguments)), None)
