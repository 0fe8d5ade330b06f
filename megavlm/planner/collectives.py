"""Seconds of collectives by algorithm and size, and the algorithm that takes least, as NCCL chooses.

A group has n ranks, g of them in each of k nodes. A rank reaches the others of its node by a link of β bytes/s that
takes α seconds a hop, and other nodes by a network adapter of its own, β′ and α′: a node's g ranks have gβ′ together.

- **Ring.** n−1 of n pieces pass each rank. Parallel rings leave a node by different adapters, so a node sends S(n−1)/n
  bytes at gβ′, and each rank as many at β: the slower counts. Of the n−1 hops of a piece k−1 are between nodes. An
  all-reduce does it twice, once to sum and once to gather.
- **Tree.** Two binary trees over the nodes, each for half of the bytes; no node is inside of both, so each sends all
  bytes up and down once (Sanders, Speck, Träff 2009); within a node a chain. Twice g−1 + log₂k hops and S bytes.
- **Two-level.** Reduce-scatter within the node, all-reduce of each rank's part with the same rank of other nodes,
  all-gather within the node (Cho et al. 2019, BlueConnect; Wang et al. 2023, ZeRO++). Each waits for the one before.
- **Reduction Server** (Google Cloud 2021). Workers send gradients to servers that add them up, and receive the sum at
  the same time: S bytes instead of 2S(n−1)/n. Within the node as two-level. Each of r servers receives and sends S/r
  for each node, so it carries kS/r.

Hops and bytes of rings and trees are those by which NCCL chooses (`src/graph/tuning.cc`), with the 0.9 of a ring's rate
that it takes trees to reach. Its protocols for small messages, NVLink SHARP and PAT are left out. Reduce-scatter and
all-gather have no tree.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial

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
        """Return how many of the ranks a node has, at least."""
        return self.ranks // self.nodes

    @property
    def rate(self) -> float:
        """Return the bytes/s at which all of a group's ranks can pass bytes on, around all nodes."""
        return self.near.bandwidth if self.nodes == 1 else min(self.near.bandwidth, self.per_node * self.far.bandwidth)


AllReduce = Callable[[float, Group], float]


def group_of(hardware: Hardware, ranks: int, *, span: int) -> Group:
    """Return a group of `ranks` ranks, spaced evenly over `span` consecutive ranks of the world."""
    if span <= hardware.devices_per_node:
        return Group(ranks, 1, hardware.near, hardware.far)
    most = max(1, hardware.devices_per_node * ranks // span)
    return Group(ranks, math.ceil(ranks / most), hardware.near, hardware.far)


def ring_gather(size: float, group: Group) -> float:
    """Return the seconds of an all-gather to `size` bytes, or of a reduce-scatter of as many."""
    n, k = group.ranks, group.nodes
    return (n - k) * group.near.latency + (k - 1) * group.far.latency + size * (n - 1) / n / group.rate


def ring(size: float, group: Group) -> float:
    """Return the seconds of a ring all-reduce of `size` bytes."""
    return 2 * ring_gather(size, group)


def tree(size: float, group: Group) -> float:
    """Return the seconds of an all-reduce of `size` bytes by two trees."""
    hops = (group.per_node - 1) * group.near.latency + math.log2(group.nodes) * group.far.latency
    return 2 * (hops + size / (_TREE_SHARE * group.rate)) if group.ranks > 1 else 0.0


def two_level_gather(size: float, group: Group) -> float:
    """Return the seconds of an all-gather (or reduce-scatter) first between nodes, then within them, or the reverse."""
    g, k = group.per_node, group.nodes
    across = (k - 1) * group.far.latency + size / g * (k - 1) / k / group.far.bandwidth
    return across + _within(size, group)


def two_level(size: float, group: Group) -> float:
    """Return the seconds of an all-reduce of `size` bytes in two levels."""
    return 2 * two_level_gather(size, group)


def reduction_server(size: float, group: Group, *, servers: int, link: Link) -> float:
    """Return the seconds of an all-reduce of `size` bytes by `servers`, each with this link."""
    if group.nodes == 1:
        return ring(size, group)
    worker = size / group.per_node / group.far.bandwidth
    server = size * group.nodes / servers / link.bandwidth
    return 2 * _within(size, group) + group.far.latency + link.latency + max(worker, server)


def _within(size: float, group: Group) -> float:
    g = group.per_node
    return (g - 1) * group.near.latency + size * (g - 1) / g / group.near.bandwidth


NCCL: Mapping[str, AllReduce] = {"ring": ring, "tree": tree}
EVERY: Mapping[str, AllReduce] = {**NCCL, "two-level": two_level}


def with_servers(servers: int, link: Link) -> Mapping[str, AllReduce]:
    """Return what a job can choose from that has so many reduction servers."""
    return {**NCCL, "reduction server": partial(reduction_server, servers=servers, link=link)}


def fastest(size: float, group: Group, choices: Mapping[str, AllReduce] = NCCL) -> tuple[str, float]:
    """Return which all-reduce of `size` bytes takes least, and its seconds."""
    seconds = {name: algorithm(size, group) for name, algorithm in choices.items()}
    name = min(seconds, key=seconds.__getitem__)
    return name, seconds[name]


def all_reduce(size: float, group: Group) -> float:
    """Return the seconds of NCCL's all-reduce of `size` bytes."""
    return fastest(size, group)[1]


def gathers(sizes: Iterable[float], group: Group) -> float:
    """Return the seconds of NCCL's all-gathers or reduce-scatters, one after the other."""
    return sum(ring_gather(size, group) for size in sizes)


def all_to_all(size: float, group: Group) -> float:
    """Return the seconds of an all-to-all of a rank's `size` bytes.

    A rank sends 1/n to each of n ranks: to those of its node by the link between devices, to the others by the network,
    all at once.
    """
    n, g = group.ranks, group.per_node
    if n == 1:
        return 0.0
    seconds = group.near.seconds(size * (g - 1) / n)
    return max(seconds, group.far.seconds(size * (n - g) / n)) if n > g else seconds
