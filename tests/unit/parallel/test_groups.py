"""Groups are made by their members alone, each once, and none that nobody uses; how members meet."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from megavlm.errors import RankError, UserError
from megavlm.parallel import rendezvous
from megavlm.parallel.rendezvous import Meeting, agree, join, refuse_shared_devices
from megavlm.programs import train

COUNT = """
import json, sys
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from megavlm import backend
backend.activate()
from megavlm.arch.dims import Dims
from megavlm.parallel import groups

calls, theirs = [], dist.new_group
def counted(ranks, *args, **words):
    calls.append(len(ranks))
    return theirs(ranks, *args, **words)
dist.new_group = counted
for world, degrees, words in json.loads(sys.argv[1]):
    dims = Dims(**{"tp": 1, "pp": 1, "cp": 1, **degrees})
    dims = Dims(**vars(dims) | {"dp": world // dims.replica})
    dist.init_process_group("fake", rank=world // 2 + 1, world_size=world, store=FakeStore())
    calls.clear()
    owners = (0, dims.pp - 1)
    made = groups.build_groups(dims, tied_owners=owners, seed=1, timeout_minutes=1, **words)
    try:
        dist.all_reduce(torch.zeros(1), group=made.collection.mp)
        raise SystemExit("a group that is not made was used")
    except ValueError:
        assert made.collection.mp.size() == dims.tp * dims.pp
        print(*calls)
    groups.destroy_groups()
"""

# World, degrees, options, and the most groups that there may be of each rank. Where TP, CP and PP divide ranks, two are
# enough; a further division needs up to 0.6 more, for other ranks exchange something in it.
LAYOUTS: list[tuple[int, dict[str, int], dict[str, int], float]] = [
    (16384, {"tp": 2, "cp": 2, "pp": 2}, {}, 2),
    (1024, {"tp": 2, "cp": 2, "pp": 2}, {}, 2),  # the most: groups of two ranks in each direction
    (1024, {"tp": 2, "cp": 2, "pp": 4}, {}, 1.6),  # a stage that ties nothing
    (1024, {"tp": 2, "cp": 2, "pp": 128}, {}, 2.2),  # two data-parallel copies are a fourth direction
    (1024, {"tp": 4, "pp": 8, "ep": 32}, {}, 0.8),
    (1024, {"tp": 4, "cp": 2, "pp": 2}, {"encoder_tp": 2}, 2),
    (1024, {"tp": 2, "cp": 2, "pp": 2}, {"encoder_tp": 4, "shard_size": 8}, 2.1),
    (1024, {"tp": 2, "cp": 2, "pp": 2}, {"shard_size": 128}, 2.5),
    (1024, {"tp": 2, "cp": 4, "pp": 64, "cp_groups": 2}, {}, 2.6),
    (1024, {"tp": 2, "cp": 2, "pp": 2, "ep": 2, "etp": 8}, {}, 2.7),
]


def test_a_rank_makes_its_own_groups_alone() -> None:
    """3,185 and 47,825 were made by all ranks at TP8·PP8. Of one rank: a handle, and one where a stage ties nothing."""
    words = json.dumps([layout[:3] for layout in LAYOUTS])
    done = subprocess.run([sys.executable, "-c", COUNT, words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for layout, line in zip(LAYOUTS, done.stdout.splitlines(), strict=True):
        sizes = [int(word) for word in line.split()]
        assert len(sizes) <= 16, layout
        assert sizes.count(1) <= 2, layout
        assert sum(1 / size for size in sizes if size > 1) <= layout[-1], layout


def test_hosts_exchange_over_gloo_where_devices_do_over_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    from megavlm.parallel.groups import GroupMaker

    group: Any = SimpleNamespace(size=lambda: 2)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [4, 6])
    monkeypatch.setattr(dist, "new_group", lambda ranks, **words: (ranks, words))
    maker = GroupMaker(timedelta(minutes=3))
    monkeypatch.setattr(dist, "get_backend", lambda group: "gloo")
    assert maker.on_host(group) is group
    monkeypatch.setattr(dist, "get_backend", lambda group: "nccl")
    words = {"backend": "gloo", "timeout": timedelta(minutes=3), "use_local_synchronization": True}
    assert maker.on_host(group) == ([4, 6], words)


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


def test_a_start_that_died_half_way_is_no_trap(port: int, monkeypatch: pytest.MonkeyPatch):
    """Ranks that wrote their words and never heard an answer; a rank 0 that was alone."""
    monkeypatch.setattr(rendezvous, "_GRACE", 1.0)
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
