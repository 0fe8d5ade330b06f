"""Groups are made by their members alone, each once: counted on torch's fake groups, as any rank of a large world."""

from __future__ import annotations

import subprocess
import sys
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

COUNT = """
import sys
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from megavlm import backend
backend.activate()
from megavlm.arch.dims import Dims
from megavlm.parallel import groups

world, encoder_tp, shard, rank = map(int, sys.argv[1:5])
sizes = dict(word.split("=") for word in sys.argv[5:])
dims = {name: int(size) for name, size in sizes.items()}
used = 1
for name in ("tp", "pp", "cp"):
    used *= dims.get(name, 1)
dims = Dims(**{"tp": 1, "pp": 1, "vpp": 1, "dp": world // used, **dims})
dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
calls = []
theirs = dist.new_group
def counted(ranks, *args, **words):
    calls.append(len(ranks))
    return theirs(ranks, *args, **words)
dist.new_group = counted
owners = (0, dims.pp - 1)
groups.build_groups(
    dims, tied_owners=owners, seed=1, timeout_minutes=1, shard_size=shard or None, encoder_tp=encoder_tp
)
print(*calls)
"""


def made(world: int, layout: str, *, encoder_tp: int = 1, shard: int = 0, rank: int = 0) -> list[int]:
    """Return the sizes of the groups that one rank makes, from a process of its own."""
    words = (str(world), str(encoder_tp), str(shard), str(rank), *layout.split())
    done = subprocess.run([sys.executable, "-c", COUNT, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [int(word) for word in done.stdout.split()]


@pytest.mark.parametrize(
    ("world", "layout", "encoder_tp", "shard", "in_the_world"),
    [
        (16384, "tp=8 pp=8", 1, 0, 1),
        (1024, "tp=4 pp=8 ep=32", 1, 0, 1.5),
        (1024, "tp=2 cp=2 pp=2", 4, 8, 2.5),  # the most: groups of two ranks in each direction
    ],
)
def test_a_rank_makes_its_own_groups_alone(world, layout, encoder_tp, shard, in_the_world):
    """3,185 and 47,825 were made by all ranks at TP8·PP8. Of one rank: a handle, and one where a stage ties nothing."""
    sizes = made(world, layout, encoder_tp=encoder_tp, shard=shard, rank=world // 2 + 1)
    assert len(sizes) <= 16
    assert sizes.count(1) <= 2
    assert sum(world / size for size in sizes if size > 1) <= in_the_world * world


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
