"""Images to ranks: longest processing time first."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def assign_longest_first(costs: Sequence[float], ranks: int) -> tuple[int, ...]:
    """Which rank takes each item: the costliest goes first, always to the rank with the least to do (Graham 1969).

    The largest load is at most 4/3 of the best possible. Pure and without ties left to chance, so that every rank that
    knows the costs knows the whole assignment: equal costs go in order, to the lower of equally loaded ranks.
    """
    loads = [(0.0, rank) for rank in range(ranks)]
    owners = [0] * len(costs)
    for item in sorted(range(len(costs)), key=lambda item: (-costs[item], item)):
        load, rank = heapq.heappop(loads)
        owners[item] = rank
        heapq.heappush(loads, (load + costs[item], rank))
    return tuple(owners)
