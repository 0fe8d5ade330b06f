"""Thin a product of cases: every pair of what may interact is tried, and few cases are.

A fault of a layout shows with one axis of it or with two things that meet (an axis and a model, an axis and an option),
seldom with three. A cover of pairs costs about the product of the two largest sets, in place of the product of all.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from heapq import heapify, heappop, heappush
from itertools import combinations, product
from typing import Any, TypeVar

import pytest

from tests.support.training import LONG, THREE

Case = TypeVar("Case")


def covering(cases: Iterable[Case], shows: Callable[[Case], Iterable[Hashable]]) -> list[Case]:
    """Return few of the cases, in their order, that together show all that any of them shows.

    The cover is greedy: next comes the case that shows most that is new, the first of equals.
    """
    given = list(cases)
    shown = [set(shows(case)) for case in given]
    seen: set[Hashable] = set()
    waiting = [(-len(each), place) for place, each in enumerate(shown)]
    heapify(waiting)
    taken = []
    while waiting:
        promised, place = heappop(waiting)
        new = len(shown[place] - seen)
        if new and new < -promised:  # others may show more by now
            heappush(waiting, (-new, place))
        elif new:
            taken.append(place)
            seen |= shown[place]
    return [given[place] for place in sorted(taken)]


def pairs(*sets: Collection[Hashable]) -> set[tuple[Hashable, Hashable]]:
    """Return each pair of elements of two of the sets."""
    return {pair for first, second in combinations(sets, 2) for pair in product(first, second)}


def axes_of(flags: str) -> list[str]:
    """Return the options of a layout without their sizes: `--tp 2 --pp 4` has `--tp` and `--pp`; none is replicas."""
    return [word for word in flags.split() if word.startswith("--")] or ["replicas"]


def slow(*case: Any, **options: Any) -> Any:
    """Return a case of `parametrize` that `make test-all` runs, and `make test` leaves out."""
    return pytest.param(*case, marks=pytest.mark.slow, **options)


def fast_and_slow(fast: Collection[Any], every: Iterable[Any]) -> list[Any]:
    """Return cases of `parametrize`, tuples or single values: those of `make test`, and the rest of `every` as slow."""
    return [*fast, *(slow(*case) if isinstance(case, tuple) else slow(case) for case in every if case not in fast)]


def short_and_long(
    short: Iterable[tuple[Any, ...]], long: Iterable[tuple[Any, ...]], steps: Sequence[str] = LONG
) -> list[Any]:
    """Return cases with their steps: the short ones for three, and in `make test-all` each of `long` for `steps`."""
    return [*((*case, THREE) for case in short), *(slow(*case, steps) for case in dict.fromkeys(long))]
