"""Which rows of features go where: pure arithmetic for the exchange between a colocated encoder and the embedding.

Legend: R rows of features of a window of micro-batches, in the order of their tokens; M ranks of a model replica.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.int64]
Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class Route:
    """One rank's part in an exchange. Places count in the rows that it holds before, and in those that it has after."""

    send: tuple[Rows, ...]  # [M] places among the rows held before, for each rank
    receive: tuple[Rows, ...]  # [M] places among the rows had after, from each rank

    @property
    def received(self) -> int:
        return sum(len(rows) for rows in self.receive)


@dataclass(frozen=True)
class FeatureExchange:
    """Features from the ranks that make them to those that merge them, and gradients back.

    `wants` says which rows each rank merges. Where several merge the same row (tensor parallelism without sequence
    parallelism), each has its whole gradient, and `returns` says which of them sends it.
    """

    owner: Rows  # [R] the rank that makes a row
    wants: Mask  # [M, R]
    returns: Mask  # [M, R], each row once

    def features(self, rank: int) -> Route:
        """Rows made on a rank, in order → rows that it merges, in order."""
        made, merged = np.flatnonzero(self.owner == rank), np.flatnonzero(self.wants[rank])
        return Route(
            send=tuple(np.flatnonzero(wanted[made]) for wanted in self.wants),
            receive=tuple(np.flatnonzero(self.owner[merged] == source) for source in range(len(self.wants))),
        )

    def gradients(self, rank: int) -> Route:
        """Rows that a rank merges, in order → rows made on it, in order."""
        made, merged = np.flatnonzero(self.owner == rank), np.flatnonzero(self.wants[rank])
        mine = self.returns[rank][merged]
        return Route(
            send=tuple(np.flatnonzero(mine & (self.owner[merged] == target)) for target in range(len(self.wants))),
            receive=tuple(np.flatnonzero(returned[made]) for returned in self.returns),
        )


def shard_size(rows: int, ranks: int) -> int:
    """Rows of each rank where `rows` are dealt to `ranks` in consecutive runs; the last may have fewer, or none."""
    return -(-rows // ranks)


def senders(encoder: Rows, *, width: int) -> Rows:
    """[R] the rank that sends each row, where `encoder` [R] made it: `width` neighbouring ranks are an encoder."""
    sender = encoder * width
    for number in np.unique(encoder):
        mine = np.flatnonzero(encoder == number)
        sender[mine] += np.arange(len(mine)) // shard_size(len(mine), width)
    return sender


def feature_exchange_of(
    owner: Sequence[int] | Rows, shards: Rows | None, *, merging: int, ranks: int
) -> FeatureExchange:
    """Rows made by `owner`, merged by the first `merging` of `ranks` ranks.

    Args:
        shards: [R] the one rank that merges each row; None: all of them merge every row, and the sending of gradients
            is divided evenly.
    """
    owners = np.asarray(owner, dtype=np.int64)
    count = len(owners)
    home = np.arange(count) * merging // max(count, 1) if shards is None else shards
    returns = np.arange(ranks)[:, None] == home[None]
    wants = returns if shards is not None else np.repeat(np.arange(ranks) < merging, count).reshape(ranks, count)
    return FeatureExchange(owners, wants, returns)
