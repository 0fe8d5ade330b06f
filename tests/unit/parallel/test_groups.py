"""Groups are made by their members alone, each once, and none that nobody uses: counted on torch's fake groups, as any
rank of a large world.
"""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

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
    made = groups.build_groups(dims, tied_owners=owners, seed=1, timeout_minutes=1, sharded=True, **words)
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
