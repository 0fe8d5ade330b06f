"""Ranks of a start find one another in a store that is full of what earlier starts left."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from megavlm.errors import RankError, UserError
from megavlm.parallel.rendezvous import Meeting, agree, join, refuse_shared_devices
from megavlm.programs import train

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


def test_an_address_that_nobody_can_use_is_one_line(port: int, monkeypatch: pytest.MonkeyPatch):
    for address, number, line in (("no-such-host.invalid", "1", "is not known here"), ("127.0.0.1", str(port), "")):
        world = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": address, "MASTER_PORT": number}
        for name, value in world.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(RankError, match=f"MASTER_ADDR {address}.*{line}") as raised:
            join(timedelta(seconds=1))
        assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("devices", "line"), [("abc", None), ("aba", "ranks 0 and 2 have the same GPU"), ("aab", "0 and 1")]
)
def test_all_ranks_refuse_a_device_that_two_of_them_have(port: int, devices: str, line: str | None):
    def one(rank: int) -> str | None:
        store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=SOON)
        try:
            refuse_shared_devices(Meeting(store, rank, len(devices)), device=devices[rank])
        except UserError as error:
            return str(error)
        return None

    with ThreadPoolExecutor(len(devices)) as threads:
        (told,) = set(threads.map(one, range(len(devices))))
    assert (told is None) if line is None else line in str(told)


def test_a_mistake_of_one_machine_is_said_once_before_the_ranks_have_met(port: int, monkeypatch: pytest.MonkeyPatch):
    """As a model that is missing on the second node alone: the first rank to say so is not rank 0."""
    here = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for name, value in {**here, "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: False)  # whatever other tests left behind
    assert [train._speaks(), train._speaks()] == [True, False]
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert train._speaks()
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE")
    assert not train._speaks()
