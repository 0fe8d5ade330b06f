"""Seconds of collectives: equations by hand, which one is chosen by size, and groups that do not fill their nodes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megavlm.arch.dims import Dims
from megavlm.command_line.parsing import parse
from megavlm.planner.auto import memory_of
from megavlm.planner.collectives import Group, all_reduce, group_of, ring, tree
from megavlm.planner.hardware import PROFILES, Link
from megavlm.planner.memory import table
from megavlm.rules.defaults import resolve
from tests.support.training import LEAN

H100 = PROFILES["h100"]
NEAR, FAR = Link(400e9, 1e-6), Link(50e9, 5e-6)
NODE, NODES, SPREAD = Group(8, 1, NEAR, FAR), Group(32, 4, NEAR, FAR), Group(4, 4, NEAR, FAR)
LARGE, SMALL = 1e11, 1e3


def test_bytes_by_hand() -> None:
    """A node's ranks share its eight adapters, 400 GB/s; a rank that is alone in its node has one, 50 GB/s."""
    assert ring(LARGE, NODE) == pytest.approx(2 * LARGE * 7 / 8 / 400e9, rel=1e-3)
    assert ring(LARGE, NODES) == pytest.approx(2 * LARGE * 31 / 32 / 400e9, rel=1e-2)
    assert ring(LARGE, SPREAD) == pytest.approx(2 * LARGE * 3 / 4 / 50e9, rel=1e-2)
    assert tree(LARGE, NODES) == pytest.approx(2 * LARGE / (0.9 * 400e9), rel=1e-2)
    few = replace(NODES, far=Link(1e9, 5e-6))  # 8 GB/s of a node: the links inside do not matter
    assert ring(LARGE, few) == pytest.approx(2 * LARGE * 31 / 32 / 8e9, rel=1e-2)


def test_hops_by_hand() -> None:
    """Of a ring's 31 hops each way 3 are between nodes; a tree has 7 within a node and 2 across."""
    assert ring(0, NODES) == pytest.approx(2 * (28 * 1e-6 + 3 * 5e-6))
    assert tree(0, NODES) == pytest.approx(2 * (7 * 1e-6 + 2 * 5e-6))


def test_nccl_takes_trees_for_small_tensors_and_rings_for_large_ones() -> None:
    for nodes in (4, 64, 256):
        group = Group(8 * nodes, nodes, NEAR, FAR)
        assert all_reduce(SMALL, group) == tree(SMALL, group) < ring(SMALL, group)
        assert all_reduce(LARGE, group) == ring(LARGE, group) < tree(LARGE, group)
    assert all(all_reduce(size, NODE) == ring(size, NODE) for size in (SMALL, LARGE))


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


@pytest.mark.parametrize(
    ("flags", "dims", "gib"),
    [
        ("", Dims(), 0.54),
        ("", Dims(dp=4), 1.07),  # the world's communicator, and that of the data-parallel ranks
        ("--tp 2 --pp 2", Dims(tp=2, pp=2, dp=2), 1.19),  # TP, PP, DP and a replica
    ],
)
def test_a_gpu_holds_its_context_and_a_communicator_of_each_group(flags: str, dims: Dims, gib: float) -> None:
    config = resolve(parse([*LEAN, "--global-batch-size", "8", *flags.split()]), vocab_size=97)
    on_gpu, on_cpu = (memory_of(config, dims, on_gpu=each) for each in (True, False))
    assert all(each.communicators == pytest.approx(gib * 2**30) for each in on_gpu)
    assert {each.communicators for each in on_cpu} == {0.0}
    assert "communicators" in table(on_gpu)
    assert "communicators" not in table(on_cpu)
