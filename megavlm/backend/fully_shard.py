"""Give torch's `fully_shard` process groups that are there already."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh


@contextmanager
def resharding_among(
    inside: dist.ProcessGroup, across: dist.ProcessGroup, *, shard: dist.ProcessGroup, device: str
) -> Iterator[None]:
    """Return a context in which `fully_shard` lets the ranks of `inside` keep weights between forward and backward.

    `shard` is cut into such neighbours, and `across` has the ranks with the same place in each. torch itself
    (`reshard_after_forward=N`) makes a mesh for each call: two process groups for each layer, and only with the ranks
    of `shard`, where all of the world have to take part.
    """
    implementation: Any = importlib.import_module("torch.distributed.fsdp._fully_shard._fully_shard")
    common: Any = importlib.import_module("torch.distributed.fsdp._fully_shard._fsdp_common")
    ranks = torch.tensor(dist.get_process_group_ranks(shard)).view(-1, inside.size())
    mesh = DeviceMesh.from_group([across, inside], device, mesh=ranks, mesh_dim_names=("across", "inside"))
    info = common.HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)
    before = implementation._get_post_forward_mesh_info
    implementation._get_post_forward_mesh_info = lambda size, mesh_info: info
    try:
        yield
    finally:
        implementation._get_post_forward_mesh_info = before
