"""Which weights are matrices between hidden states, and which of their rows are one matrix. No torch.

An update rule that treats a matrix as a whole must know that `linear_qkv` holds queries, keys and values, that
the first layer of a gated MLP holds gate and up, and that a tensor of experts holds one matrix of each. Embeddings,
the output layer, the patch embedding and position tables are not of this sort: each of their rows (or columns) belongs
to a token, a pixel or a position, and not to a hidden channel.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise

ROUND = 2**24  # elements of matrices that a rank has at a time, unless one is larger


@dataclass(frozen=True)
class Band:
    """The rows of a weight that are one matrix: of every `period` rows, `count` from row `first` on."""

    first: int
    count: int
    period: int

    def before(self, row: int) -> int:
        """Return how many rows of the band lie before a row of the weight."""
        periods, rest = divmod(row, self.period)
        return periods * self.count + min(max(rest - self.first, 0), self.count)

    def runs(self, start: int, end: int) -> Iterator[tuple[int, int, int]]:
        """Yield the band's rows within rows `start` … `end − 1` of the weight as (row, periods, count): in each of so
        many consecutive periods, `count` rows, the first of them `row`. There are at most three runs.
        """
        whole = range(-(-start // self.period), end // self.period)  # periods that lie within
        if len(whole) == 0:
            middle = min(end, -(-start // self.period) * self.period)
            yield from self._in_period(start, middle)
            yield from self._in_period(middle, end)
            return
        yield from self._in_period(start, whole.start * self.period)
        yield whole.start * self.period + self.first, len(whole), self.count
        yield from self._in_period(whole.stop * self.period, end)

    def _in_period(self, start: int, end: int) -> Iterator[tuple[int, int, int]]:
        origin = start // self.period * self.period + self.first
        low, high = max(start, origin), min(end, origin + self.count)
        if low < high:
            yield low, 1, high - low


@dataclass(frozen=True)
class HiddenWeight:
    """A weight [rows, columns], or [experts, rows, columns], whose rows fall into one or more matrices."""

    rows: int  # without padding
    columns: int
    bands: tuple[Band, ...]
    experts: int = 0  # 0: no axis of experts

    @property
    def size(self) -> int:
        return self.rows * self.columns * (self.experts or 1)

    def shapes(self) -> Iterator[tuple[int, int]]:
        """Yield rows and columns of each matrix."""
        for _ in range(self.experts or 1):
            for band in self.bands:
                yield band.before(self.rows), self.columns


def hidden_weight(columns: int, *counts: int, periods: int = 1, experts: int = 0) -> HiddenWeight:
    """Return a weight whose rows are `periods` times `counts` rows, those of one matrix after those of the next.

    Gate and up are two counts in one period; queries, keys and values three in as many periods as there are groups.
    """
    period = sum(counts)
    ends = accumulate(counts, initial=0)
    bands = tuple(Band(first, end - first, period) for first, end in pairwise(ends))
    return HiddenWeight(periods * period, columns, bands, experts)
