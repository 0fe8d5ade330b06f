"""Patches of megatron-core and torch that apply on every device."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh


def install() -> None:
    """Apply the patches for every device. Imports megatron-core. Idempotent."""
    _patch_clipping()
    _patch_router()
    _patch_optimizers()
    _patch_casts()


def _patch_casts() -> None:
    # With weights in FP8 and current scales, an update casts this rank's flat part of each weight. Transformer Engine
    # also writes that part transposed, as a column that nothing reads: 3.6 ms for each weight of LLaVA-7B on an H200.
    try:
        casts: Any = importlib.import_module("transformer_engine.pytorch.tensor.utils")
    except ImportError:
        return
    name = "_cast_master_weights_to_fp8_current_scaling"
    if hasattr(casts, name) and hasattr(casts, "Float8Quantizer"):
        setattr(casts, name, without_transposes(casts, getattr(casts, name)))


def without_transposes(casts: Any, cast: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `cast`, a function of the module `casts`, so that its quantizers write no transposed copy. Idempotent."""

    @wraps(cast)
    def flat(*args: Any, **kwargs: Any) -> Any:
        quantizer = casts.Float8Quantizer
        casts.Float8Quantizer = partial(quantizer, columnwise=False)
        try:
            return cast(*args, **kwargs)
        finally:  # other code checks whether a quantizer is an instance of this class
            casts.Float8Quantizer = quantizer

    return cast if hasattr(cast, "__wrapped__") else flat


def _patch_optimizers() -> None:
    # torch marks these methods as not to be compiled when they are first called, and imports its compiler for that,
    # which takes half a second. Nothing compiles an optimizer here.
    for name in ("add_param_group", "state_dict", "load_state_dict", "zero_grad"):
        method = getattr(torch.optim.Optimizer, name)
        setattr(torch.optim.Optimizer, name, getattr(method, "__wrapped__", method))


def _patch_router() -> None:
    # Without Transformer Engine the router's product looks for a name that the failed import left undefined.
    routing: Any = importlib.import_module("megatron.core.transformer.moe.moe_utils")
    routing.te_general_gemm = getattr(routing, "te_general_gemm", None)


def _patch_clipping() -> None:
    # Without Transformer Engine and Apex, megatron-core computes the norm of one parameter after the other, and
    # synchronises with the device for each.
    clipping: Any = importlib.import_module("megatron.core.optimizer.clip_grads")
    utils: Any = importlib.import_module("megatron.core.utils")
    if clipping.l2_norm_impl is utils.local_multi_tensor_l2_norm:
        clipping.l2_norm_impl = norm


def norm(chunk_size: int, flag: Any, tensors: list[list[Tensor]], per_tensor: bool) -> tuple[Tensor, None]:
    """Return the norm of all tensors together, [1] on their device, without synchronising."""
    parts = [part for each in tensors for part in torch._foreach_norm(each)]
    return torch.linalg.vector_norm(torch.stack(parts)).view(1), None


def read_checkpoints_with(reader: Callable[[str | Path], Any]) -> None:
    """Make megatron-core load checkpoints with `reader`, because its own reader unpickles arbitrary content."""
    strategy: Any = importlib.import_module("megatron.core.dist_checkpointing.strategies.torch")
    strategy._get_filesystem_reader = lambda folder, cache_metadata=False: reader(folder)


def describe_tensors_to_rank_0() -> None:
    """Make megatron-core check on rank 0 what a save writes without telling all other ranks, which check nothing."""
    strategy: Any = importlib.import_module("megatron.core.dist_checkpointing.strategies.fully_parallel")
    strategy.determine_global_metadata = described_on_rank_0


def described_on_rank_0(sharded_state_dict: Any) -> tuple[list[Any], list[Any]]:
    """Return descriptions of this rank's tensors, and on rank 0 those of all ranks, by rank; every rank calls it."""
    values: Any = importlib.import_module("megatron.core.dist_checkpointing.dict_utils").nested_values
    own = [each.without_data() for each in values(sharded_state_dict)]
    found: list[Any] = [None] * dist.get_world_size()
    dist.gather_object(own, found if dist.get_rank() == 0 else None)
    return own, found


@contextmanager
def groups_of_members(state: Any, of: Callable[[Sequence[int], str], Any]) -> Iterator[None]:
    """Return a context in which megatron-core's `state` gets this rank's groups from `of`, and creates no others.

    The arguments of `of` are the ranks of a group and megatron-core's name for the group.
    """
    theirs = state.create_group
    state.create_group = lambda ranks, *_, group_desc, **__: of(ranks, group_desc) if dist.get_rank() in ranks else None
    try:
        yield
    finally:
        state.create_group = theirs


@contextmanager
def resharding_among(
    inside: dist.ProcessGroup, across: dist.ProcessGroup, *, shard: dist.ProcessGroup, device: str
) -> Iterator[None]:
    """Return a context in which `fully_shard` reshards weights after the forward pass over the ranks of `inside` only.

    `shard` is divided into subgroups of neighbours like `inside`; `across` has the ranks at the same position in each
    subgroup. torch's own option (`reshard_after_forward=N`) makes a mesh for each call: two process groups for each
    layer, created by the ranks of `shard` only, although all ranks of the world have to take part.
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
