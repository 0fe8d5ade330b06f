"""Which record comes when: a pure function of the seed and an index, so that a position in the data is one integer."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

# Samples in which the sources' shares are kept, to one part in as many.
BLOCK = 4096
_ROUNDS = 6


@dataclass(frozen=True)
class RecordRef:
    """Record `record` of source `source`, for the `epoch`-th time (from 0)."""

    source: int
    record: int
    epoch: int


@dataclass(frozen=True)
class Order:
    """The endless stream of samples of several sources, each shuffled anew in every epoch of its own.

    Any place is found in constant time and memory: sources alternate in blocks of `BLOCK` samples, and within a source
    a permutation of the record numbers is computed, not stored.
    """

    lengths: tuple[int, ...]  # records of each source
    weights: tuple[float, ...]  # relative shares of the samples
    seed: int
    shuffle: bool = True

    def record(self, index: int) -> RecordRef:
        """Return the record that is sample `index` of the blend."""
        block, within = divmod(index, BLOCK)
        source, before = self._block[within]
        count = block * self._counts[source] + before
        epoch, place = divmod(count, self.lengths[source])
        if not self.shuffle:
            return RecordRef(source, place, epoch)
        return RecordRef(source, permuted(place, self.lengths[source], key=f"{self.seed}/{source}/{epoch}"), epoch)

    @cached_property
    def _counts(self) -> list[int]:
        return apportioned(self.weights, BLOCK)

    @cached_property
    def _block(self) -> list[tuple[int, int]]:
        """(source, how many of it came before) of each place of a block: every source evenly spread."""
        spread = [
            ((number + 0.5) / count, source, number)
            for source, count in enumerate(self._counts)
            for number in range(count)
        ]
        return [(source, number) for _, source, number in sorted(spread)]


def apportioned(weights: Sequence[float], total: int) -> list[int]:
    """Whole numbers that add up to `total` in proportion to `weights`, none below 1 (Hamilton's method)."""
    assert 0 < len(weights) <= total
    spare = total - len(weights)
    exact = [weight / sum(weights) * spare for weight in weights]
    counts = [1 + int(share) for share in exact]
    by_remainder = sorted(range(len(exact)), key=lambda i: (int(exact[i]) - exact[i], i))
    for i in by_remainder[: total - sum(counts)]:
        counts[i] += 1
    return counts


def permuted(place: int, length: int, *, key: str) -> int:
    """The number at `place` of a permutation of 0 … length−1 that `key` names.

    A Feistel network permutes the smallest square 2^b × 2^b that holds them; numbers that fall outside walk on until
    they are inside (Black and Rogaway 2002, "Ciphers with arbitrary finite domains"): at most 4 steps on average.
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
