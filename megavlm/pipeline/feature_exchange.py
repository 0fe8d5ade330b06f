"""The rows of image features that each rank sends and receives between a colocated encoder and the embedding.

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
    """The rows that one rank sends and receives, as indices into its rows before and after an exchange."""

    send: tuple[Rows, ...]  # [M] indices of the rows held before that go to each rank
    receive: tuple[Rows, ...]  # [M] indices of the rows held after that come from each rank

    @property
    def received(self) -> int:
        return sum(len(rows) for rows in self.receive)


@dataclass(frozen=True)
class FeatureExchange:
    """The transfer of features from the ranks that encode them to the ranks that merge them, and of gradients back.

    Without sequence parallelism all tensor-parallel ranks merge the same rows. Each of them then has a row's whole
    gradient, and one of them returns it.
    """

    owner: Rows  # [R] the rank that encodes each row
    wants: Mask  # [M, R] whether a rank merges a row
    returns: Mask  # [M, R] whether a rank returns the gradient of a row: one rank per row

    def features(self, rank: int) -> Route:
        """Return how a rank turns the rows that it encoded, in order, into the rows that it merges, in order."""
        made, merged = np.flatnonzero(self.owner == rank), np.flatnonzero(self.wants[rank])
        return Route(
            send=tuple(np.flatnonzero(wanted[made]) for wanted in self.wants),
            receive=tuple(np.flatnonzero(self.owner[merged] == source) for source in range(len(self.wants))),
        )

    def gradients(self, rank: int) -> Route:
        """Return how a rank turns gradients of the rows that it merges into those of the rows that it encoded."""
        made, merged = np.flatnonzero(self.owner == rank), np.flatnonzero(self.wants[rank])
        mine = self.returns[rank][merged]
        return Route(
            send=tuple(np.flatnonzero(mine & (self.owner[merged] == target)) for target in range(len(self.wants))),
            receive=tuple(np.flatnonzero(returned[made]) for returned in self.returns),
        )


def shard_size(rows: int, ranks: int) -> int:
    """Return the rows per rank of `rows` cut into `ranks` contiguous shards; the last may be shorter or empty."""
    return -(-rows // ranks)


def senders(encoder: Rows, *, width: int) -> Rows:
    """Return [R], the rank that sends each row, from the encoder [R] that made it; `width` ranks are one encoder."""
    sender = encoder * width
    for number in np.unique(encoder):
        mine = np.flatnonzero(encoder == number)
        sender[mine] += np.arange(len(mine)) // shard_size(len(mine), width)
    return sender


def feature_exchange_of(owner: Sequence[int] | Rows, shards: Rows, reads: Sequence[int] | Rows) -> FeatureExchange:
    """Return the exchange of rows that `owner` [R] encodes.

    Args:
        shards: [R] which shard of the sequences each row lies in.
        reads: [M] the shard whose rows each rank merges, -1 for none. Ranks of the same shard merge the same rows, and
            divide the sending of gradients evenly.
    """
    owners, count = np.asarray(owner, dtype=np.int64), len(owner)
    wants = np.asarray(reads)[:, None] == np.asarray(shards)[None]
    turn = np.arange(count) * wants.sum(axis=0) // max(count, 1)  # which of the ranks that want a row returns it
    return FeatureExchange(owners, wants, wants & (wants.cumsum(axis=0) - 1 == turn))
