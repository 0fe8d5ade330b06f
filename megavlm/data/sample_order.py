"""Define the order of samples as a pure function of the seed and the sample number, so a position is one integer."""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, zip_longest

from megavlm.data.types import HeldOut

# Each block of this many samples has the same number of samples of each data set, so shares are exact to 1 / BLOCK.
BLOCK = 4096
_ROUNDS = 6


@dataclass(frozen=True)
class RecordRef:
    """Address of a use of a record: the index of its data set, its number there, and the epoch, counted from 0."""

    source: int
    record: int
    epoch: int


@dataclass(frozen=True)
class Order:
    """The endless sequence of samples of several data sets, which are reshuffled in every epoch.

    Without weights, an epoch has every record of all data sets once. With weights, each block of `BLOCK` samples mixes
    the data sets in proportion, and each data set has its own epochs. Any sample is found in constant time and memory:
    the permutation of records is computed, not stored.
    """

    lengths: tuple[int, ...]  # the number of records of each data set
    weights: tuple[float, ...] | None  # the relative shares of the data sets among the samples; None: their lengths
    seed: int
    shuffle: bool = True

    def record(self, index: int) -> RecordRef:
        """Return the record that is sample `index` of the blend."""
        if self.weights is None:
            epoch, place = divmod(index, self._starts[-1])
            if self.shuffle:
                place = permuted(place, self._starts[-1], key=f"{self.seed}/0/{epoch}")
            source = bisect_right(self._starts, place) - 1
            return RecordRef(source, place - self._starts[source], epoch)
        block, within = divmod(index, BLOCK)
        source, before = self._block[within]
        count = block * self._counts[source] + before
        epoch, place = divmod(count, self.lengths[source])
        if not self.shuffle:
            return RecordRef(source, place, epoch)
        return RecordRef(source, permuted(place, self.lengths[source], key=f"{self.seed}/{source}/{epoch}"), epoch)

    @property
    def shares(self) -> list[float]:
        """Return the share of each data set among the samples."""
        if self.weights is None:
            return [length / self._starts[-1] for length in self.lengths]
        return [count / BLOCK for count in self._counts]

    @cached_property
    def _starts(self) -> list[int]:
        """Return the number of records before each data set, and the total at the end."""
        return [0, *accumulate(self.lengths)]

    @cached_property
    def _counts(self) -> list[int]:
        assert self.weights is not None
        return apportioned(self.weights, BLOCK)

    @cached_property
    def _block(self) -> list[tuple[int, int]]:
        """Return, for each sample of a block, its data set and the number of earlier samples of that data set.

        The samples of each data set are spread evenly over the block.
        """
        spread = [
            ((number + 0.5) / count, source, number)
            for source, count in enumerate(self._counts)
            for number in range(count)
        ]
        return [(source, number) for _, source, number in sorted(spread)]


def weights_of(given: Sequence[float | None]) -> tuple[float, ...] | None:
    """Return the weights of data sets, with 1 for a missing weight; None if no weight is given."""
    if all(weight is None for weight in given):
        return None
    return tuple(1.0 if weight is None else weight for weight in given)


def apportioned(weights: Sequence[float], total: int) -> list[int]:
    """Return integers ≥ 1 that add up to `total`, in proportion to `weights` (Hamilton's method)."""
    assert 0 < len(weights) <= total
    spare = total - len(weights)
    exact = [weight / sum(weights) * spare for weight in weights]
    counts = [1 + int(share) for share in exact]
    by_remainder = sorted(range(len(exact)), key=lambda i: (int(exact[i]) - exact[i], i))
    for i in by_remainder[: total - sum(counts)]:
        counts[i] += 1
    return counts


def permuted(place: int, length: int, *, key: str) -> int:
    """Return the number at `place` of a permutation of 0 … length−1 that is determined by `key`.

    A Feistel network permutes the numbers below 2^2b, the smallest such power that is at least `length`. A result
    outside 0 … length−1 is permuted again until it is inside ("cycle walking"; Black and Rogaway 2002, "Ciphers with
    arbitrary finite domains"), which takes at most 4 steps on average.
    """
    assert 0 <= place < length
    bits = max(1, ((length - 1).bit_length() + 1) // 2)
    mask = (1 << bits) - 1
    while True:
        left, right = place >> bits, place & mask
        for number in range(_ROUNDS):
            digest = hashlib.blake2b(f"{key}/{number}/{right}".encode(), digest_size=8).digest()
            left, right = right, left ^ (int.from_bytes(digest, "little") & mask)
        place = left << bits | right
        if place < length:
            return place


def spread(parts: Sequence[Sequence[int]]) -> tuple[HeldOut, ...]:
    """Return the records of several data sets in one order, so that every prefix is a representative sample.

    Each data set is evenly spread over the order. Its records are shuffled, which depends only on the index of the data
    set and the number of its records.
    """
    placed = [
        ((place + 0.5) / len(records), source, records[permuted(place, len(records), key=f"validation/{source}")])
        for source, records in enumerate(parts)
        for place in range(len(records))
    ]
    return tuple(HeldOut(source, record) for _, source, record in sorted(placed))


def in_turn(samples: Sequence[HeldOut]) -> Iterator[HeldOut]:
    """Yield the samples round-robin over their data sets."""
    parts: dict[int, list[HeldOut]] = {}
    for sample in samples:
        parts.setdefault(sample.source, []).append(sample)
    for together in zip_longest(*(parts[source] for source in sorted(parts))):
        yield from filter(None, together)
