"""Packing of samples into sequences, and balanced assignment of sequences to ranks.

A sequence has a cost for each part of the model (vision, language). Each cost must be balanced, because ranks wait for
one another after each part: a rank with little text cannot catch up on many images.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_MOST_SWAPS = 4  # per item
_EVEN = 1.005  # largest load over mean load at which swapping ends


def pack(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Pack items into few bins of `capacity` by best-fit decreasing (Johnson et al. 1974).

    Items are placed from the longest to the shortest, each in the fullest bin with room for it. The number of bins is
    at most 11/9 of the smallest possible one plus 4, and within 1 % of the smallest if many items are short. The time
    is O(n log n), apart from insertions into the list of open bins.

    Returns:
        The item numbers of each bin, ascending. Bins are in the order of their first items, so that shuffled samples
        stay shuffled. In the order of packing, the longest samples would all be trained on first.

    Raises ValueError for an item that no bin holds.
    """
    if any(not 0 < length <= capacity for length in lengths):
        raise ValueError(f"items must be 1 to {capacity} long")
    bins: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # (room left, bin), rising
    for item in sorted(range(len(lengths)), key=lambda item: (-lengths[item], item)):
        index = bisect_left(rooms, (lengths[item], -1))
        if index < len(rooms):
            room, place = rooms.pop(index)
            bins[place].append(item)
        else:
            room, place = capacity, len(bins)
            bins.append([item])
        if room > lengths[item]:
            insort(rooms, (room - lengths[item], place))
    return sorted(sorted(items) for items in bins)


def assign(costs: NDArray[np.float64], ranks: int) -> list[list[int]]:
    """Assign equally many items to each rank, with a small largest load over ranks and kinds of cost.

    Costs are relative to the mean load of their kind. First each item, the costliest first, goes to the rank that is
    not full and whose largest load stays smallest (Graham 1969, for several dimensions). Then the rank with the largest
    load swaps an item with another rank, by the swap that lowers the larger load of the two most. Swaps are repeated
    until none lowers it, or the largest load is within 0.5 % of the mean.

    Args:
        costs: [N, K] ≥ 0: K kinds of cost of each of N items; `ranks` divides N.

    Returns:
        The N / ranks item numbers of each rank, ascending.
    """
    count, kinds = costs.shape
    assert count % ranks == 0, "every rank takes as many items"
    places = count // ranks
    means = costs.sum(axis=0) / ranks
    relative = costs / np.where(means > 0, means, 1)
    loads = np.zeros((ranks, kinds))
    held: list[list[int]] = [[] for _ in range(ranks)]
    for item in np.argsort(-relative.max(axis=1), kind="stable"):
        after = (loads + relative[item]).max(axis=1)
        after[[rank for rank in range(ranks) if len(held[rank]) == places]] = np.inf
        rank = int(after.argmin())
        held[rank].append(int(item))
        loads[rank] += relative[item]
    owners = np.empty(count, dtype=np.int64)
    for rank, items in enumerate(held):
        owners[items] = rank
    _swap(relative, owners, loads)
    return [np.flatnonzero(owners == rank).tolist() for rank in range(ranks)]


def of_ranks(count: int, ranks: int, size: int, costs: NDArray[np.float64] | None = None) -> list[list[int]]:
    """Return the indices of the sequences of a global batch that go to each rank.

    Micro-batches of `size` are dealt to ranks in turn, or sequences are balanced by `costs` [count, K].
    """
    if costs is not None:
        return assign(costs, ranks)
    turns = [range(rank * size, count, ranks * size) for rank in range(ranks)]
    return [[start + place for start in starts for place in range(size)] for starts in turns]


def of_micro_batches(own: Sequence[int], size: int, costs: NDArray[np.float64] | None = None) -> list[list[int]]:
    """Return the indices of the sequences of each micro-batch of a rank, whose sequences are `own`.

    Sequences stay in order, or are balanced by the `costs` [count, K] of the global batch.
    """
    groups = [list(range(start, start + size)) for start in range(0, len(own), size)]
    if costs is not None:
        groups = assign(costs[list(own)], len(groups))
    return [[own[place] for place in group] for group in groups]


def _swap(costs: NDArray[np.float64], owners: NDArray[np.int64], loads: NDArray[np.float64]) -> None:
    """Improve an assignment by swaps, in place."""
    for _ in range(_MOST_SWAPS * len(owners)):
        worst = int(loads.max(axis=1).argmax())
        mine, others = np.flatnonzero(owners == worst), np.flatnonzero(owners != worst)
        if not len(others) or loads[worst].max() <= _EVEN:
            return
        moved = costs[others][None] - costs[mine][:, None]  # [mine, others, K]: what the worst rank would gain
        here = (loads[worst] + moved).max(axis=2)
        there = (loads[owners[others]][None] - moved).max(axis=2)
        largest = np.maximum(here, there)
        best = np.unravel_index(largest.argmin(), largest.shape)
        if largest[best] >= loads[worst].max() * (1 - 1e-9):
            return
        gain = moved[best]
        sent, received = mine[best[0]], others[best[1]]
        loads[worst] += gain
        loads[owners[received]] -= gain
        owners[sent], owners[received] = owners[received], owners[sent]


def imbalance(costs: Sequence[float] | NDArray[np.float64], assignment: Sequence[Sequence[int]]) -> float:
    """Return the largest load divided by the mean load: 1 if loads are equal, or if all costs are 0."""
    values = np.asarray(costs, dtype=np.float64)
    loads = [values[list(items)].sum() for items in assignment]
    mean = sum(loads) / len(loads)
    return float(max(loads) / mean) if mean > 0 else 1.0
