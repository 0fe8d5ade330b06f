"""Predict the seconds of collectives by algorithm and size; like NCCL, take the faster of ring and tree.

A group has n ranks, g of them in each of k nodes. A rank reaches the others of its node by a link of β bytes/s that
takes α seconds a hop, and other nodes by a network adapter of its own, β′ and α′: a node's g ranks have gβ′ together.

- **Ring.** n−1 of n pieces pass each rank. Parallel rings leave a node by different adapters, so a node sends S(n−1)/n
  bytes at gβ′, and each rank as many at β: the slower counts. Of the n−1 hops of a piece k−1 are between nodes. An
  all-reduce does it twice, once to sum and once to gather.
- **Tree.** Two binary trees over the nodes, each for half of the bytes; no node is inside of both, so each sends all
  bytes up and down once (Sanders, Speck, Träff 2009); within a node a chain. Twice g−1 + log₂k hops and S bytes.

Hops and bytes of rings and trees are those by which NCCL chooses (`src/graph/tuning.cc`), with the 0.9 of a ring's rate
that it takes trees to reach. Its protocols for small messages, NVLink SHARP and PAT are left out. Reduce-scatter and
all-gather have no tree.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from megavlm.planner.hardware import Hardware, Link

_TREE_SHARE = 0.9


@dataclass(frozen=True)
class Group:
    """Ranks that communicate, and their links."""

    ranks: int
    nodes: int
    near: Link
    far: Link  # of each rank

    @property
    def per_node(self) -> int:
        """Return the least number of the group's ranks on a node."""
        return self.ranks // self.nodes

    @property
    def rate(self) -> float:
        """Return the bytes/s of a ring over the group: the slower of the links in a node and between nodes."""
        return self.near.bandwidth if self.nodes == 1 else min(self.near.bandwidth, self.per_node * self.far.bandwidth)


def group_of(hardware: Hardware, ranks: int, *, span: int) -> Group:
    """Return a group of `ranks` ranks, spaced evenly over `span` consecutive ranks of the world."""
    if span <= hardware.devices_per_node:
        return Group(ranks, 1, hardware.near, hardware.far)
    most = max(1, hardware.devices_per_node * ranks // span)
    return Group(ranks, math.ceil(ranks / most), hardware.near, hardware.far)


def ring_gather(size: float, group: Group) -> float:
    """Return the seconds of a ring all-gather to `size` bytes, or of a ring reduce-scatter of `size` bytes."""
    n, k = group.ranks, group.nodes
    return (n - k) * group.near.latency + (k - 1) * group.far.latency + size * (n - 1) / n / group.rate


def ring(size: float, group: Group) -> float:
    """Return the seconds of a ring all-reduce of `size` bytes."""
    return 2 * ring_gather(size, group)


def tree(size: float, group: Group) -> float:
    """Return the seconds of a double-tree all-reduce of `size` bytes."""
    hops = (group.per_node - 1) * group.near.latency + math.log2(group.nodes) * group.far.latency
    return 2 * (hops + size / (_TREE_SHARE * group.rate)) if group.ranks > 1 else 0.0


def all_reduce(size: float, group: Group) -> float:
    """Return the seconds of NCCL's all-reduce of `size` bytes: the faster of ring and tree."""
    return min(ring(size, group), tree(size, group))


def gathers(sizes: Iterable[float], group: Group) -> float:
    """Return the seconds of successive all-gathers or reduce-scatters of these bytes."""
    return sum(ring_gather(size, group) for size in sizes)


def all_to_all(size: float, group: Group) -> float:
    """Return the seconds of an all-to-all in which each rank has `size` bytes.

    A rank sends 1/n of its bytes to each of n ranks: within a node by the link between devices, to other nodes by the
    network, all at once.
    """
    n, g = group.ranks, group.per_node
    if n == 1:
        return 0.0
    seconds = group.near.seconds(size * (g - 1) / n)
    return max(seconds, group.far.seconds(size * (n - g) / n)) if n > g else seconds
