"""Seconds of collectives: equations by hand, which one is chosen by size, and groups that do not fill their nodes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megavlm.planner.collectives import (
    EVERY,
    Group,
    all_to_all,
    fastest,
    gathers,
    group_of,
    reduction_server,
    ring,
    tree,
    two_level,
    with_servers,
)
from megavlm.planner.hardware import PROFILES, Link

H100 = PROFILES["h100"]
NEAR, FAR = Link(400e9, 1e-6), Link(50e9, 5e-6)
NODE, NODES, SPREAD = Group(8, 1, NEAR, FAR), Group(32, 4, NEAR, FAR), Group(4, 4, NEAR, FAR)
LARGE, SMALL = 1e10, 1e3


def test_bytes_by_hand() -> None:
    """A node's ranks share its eight adapters, 400 GB/s; a rank that is alone in its node has one, 50 GB/s."""
    assert ring(LARGE, NODE) == pytest.approx(2 * LARGE * 7 / 8 / 400e9, rel=1e-3)
    assert ring(LARGE, NODES) == pytest.approx(2 * LARGE * 31 / 32 / 400e9, rel=1e-2)
    assert ring(LARGE, SPREAD) == pytest.approx(2 * LARGE * 3 / 4 / 50e9, rel=1e-2)
    assert tree(LARGE, NODES) == pytest.approx(2 * LARGE / (0.9 * 400e9), rel=1e-2)
    assert two_level(LARGE, NODES) == pytest.approx(2 * LARGE * (7 / 8 / 400e9 + 3 / 4 / 8 / 50e9), rel=1e-2)
    few = replace(NODES, far=Link(1e9, 5e-6))  # 8 GB/s of a node: the links inside do not matter
    assert ring(LARGE, few) == pytest.approx(2 * LARGE * 31 / 32 / 8e9, rel=1e-2)


def test_hops_by_hand() -> None:
    """Of a ring's 31 hops each way 3 are between nodes; a tree has 7 within a node and 2 across; two levels 7 and 3."""
    assert ring(0, NODES) == pytest.approx(2 * (28 * 1e-6 + 3 * 5e-6))
    assert tree(0, NODES) == pytest.approx(2 * (7 * 1e-6 + 2 * 5e-6))
    assert two_level(0, NODES) == pytest.approx(2 * (7 * 1e-6 + 3 * 5e-6))


def test_nccl_takes_trees_for_small_tensors_and_rings_for_large_ones() -> None:
    for nodes in (4, 64, 256):
        group = Group(8 * nodes, nodes, NEAR, FAR)
        sizes = [10**power for power in range(3, 12)]
        chosen = [fastest(size, group)[0] for size in sizes]
        assert (chosen[0], chosen[-1]) == ("tree", "ring")
        assert chosen == sorted(chosen, reverse=True), "one change, at some size"
    assert fastest(SMALL, NODE)[0] == fastest(LARGE, NODE)[0] == "ring"
    assert fastest(SMALL, Group(1, 1, NEAR, FAR)) == ("ring", 0.0)


def test_servers_halve_what_a_slow_network_carries() -> None:
    """S bytes there and back at once, instead of 2S(n−1)/n; too few servers are what is waited for."""
    slow = replace(NODES, far=Link(1e9, 5e-6))
    enough, few = (reduction_server(LARGE, slow, servers=n, link=Link(4e9, 5e-6)) for n in (8, 2))
    inside = 2 * LARGE * 7 / 8 / 400e9
    assert enough - inside == pytest.approx(LARGE / 8e9, rel=1e-3)
    assert few - inside == pytest.approx(4 * LARGE / 2 / 4e9, rel=1e-3)
    assert fastest(LARGE, slow, with_servers(8, Link(4e9, 5e-6)))[0] == "reduction server"
    # Between nodes two levels send 2S(k−1)/k, a ring 2S(n−1)/n.
    assert fastest(LARGE, slow, EVERY)[0] == "two-level"
    assert reduction_server(LARGE, NODE, servers=8, link=FAR) == ring(LARGE, NODE)


@pytest.mark.parametrize(
    ("ranks", "span", "nodes", "per_node"),
    [
        (8, 8, 1, 8),
        (4, 8, 1, 4),
        (16, 16, 2, 8),
        (4, 16, 2, 2),
        (4, 32, 4, 1),
        (2, 32, 2, 1),
        (12, 12, 2, 6),
        (1, 64, 1, 1),
    ],
)
def test_where_ranks_are(ranks: int, span: int, nodes: int, per_node: int) -> None:
    group = group_of(H100, ranks, span=span)
    assert (group.nodes, group.per_node) == (nodes, per_node)


def test_one_rank_sends_nothing_and_a_node_alone_knows_no_network() -> None:
    alone = group_of(H100, 1, span=64)
    assert ring(LARGE, alone) == tree(LARGE, alone) == gathers((LARGE, LARGE), alone) == all_to_all(LARGE, alone) == 0
    cut_off = replace(NODE, far=Link(1e-3, 1e6))
    assert fastest(LARGE, cut_off)[1] == fastest(LARGE, NODE)[1]
