"""Samples of differing length into sequences of one length: best-fit decreasing (Johnson 1973)."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence


def pack(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Divide items among as few bins of `capacity` as best-fit decreasing finds.

    The longest item goes first, each into the fullest bin that still takes it: at most 11/9 of the best possible number
    of bins plus 4, and within a hundredth of it where many items are short. O(n log n) but for the insertions into a
    list of open bins.

    Returns:
        The item numbers of each bin, rising. Bins are in the order of their first items, so that a shuffled stream of
        samples stays shuffled: by the order of packing the longest samples would all be trained first.

    Raises ValueError for an item that no bin holds.
    """
    if any(not 0 < length <= capacity for length in lengths):
        raise ValueError(f"items must be 1 to {capacity} long")
    bins: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # (room left, bin), rising
    for item in sorted(range(len(lengths)), key=lambda item: (-lengths[item], item)):
        found = bisect_left(rooms, (lengths[item], -1))
        if found < len(rooms):
            room, place = rooms.pop(found)
            bins[place].append(item)
        else:
            room, place = capacity, len(bins)
            bins.append([item])
        if room > lengths[item]:
            insort(rooms, (room - lengths[item], place))
    return sorted(sorted(items) for items in bins)
