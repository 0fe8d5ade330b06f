"""Ranks of a start find one another in a store that is full of what earlier starts left."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from megavlm.parallel.rendezvous import agree

SOON = timedelta(seconds=60)


@pytest.fixture
def port() -> Iterator[int]:
    """Of a store that stays, as torchrun's."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield store.port
    del store


def start(port: int, world: int, *, ranks: list[int] | None = None, timeout: timedelta = SOON) -> list[str]:
    """The name on which the ranks of one start agree, each through a connection of its own."""

    def one(rank: int) -> str:
        store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timeout)
        return agree(store, rank, world, timeout=timeout)

    with ThreadPoolExecutor(world) as threads:
        return list(threads.map(one, ranks or range(world)))


def test_each_start_has_a_name_of_its_own(port: int):
    """Of any number of ranks, as when agents join and leave."""
    names = [set(start(port, world)) for world in (2, 2, 4, 1, 3)]
    assert [len(each) for each in names] == [1] * 5
    assert len(set.union(*names)) == 5


def test_a_start_that_died_half_way_is_no_trap(port: int):
    """Ranks that wrote their words and never heard an answer; a rank 0 that was alone."""
    soon = timedelta(seconds=0.3)
    with pytest.raises(Exception, match=r"."):
        start(port, 3, ranks=[1, 2], timeout=soon)
    with pytest.raises(TimeoutError, match=r"^rank 1, 2, 3 of 4 did not arrive"):
        start(port, 4, ranks=[0], timeout=soon)
    with pytest.raises(TimeoutError, match=r"^rank 2 of 3 did not arrive"):
        start(port, 3, ranks=[0, 1], timeout=timedelta(seconds=2))
    assert len(set(start(port, 3))) == 1
