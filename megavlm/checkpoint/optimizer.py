"""An optimizer's state in a checkpoint: the same tensors however ranks share it, and however many optimizers there are.

Where data-parallel ranks share it, each rank writes and reads what it holds of master weights and moments as parts of
global tensors under the parameters' names (`optim/shards.py`); nothing is gathered. A colocated encoder has an
optimizer of its own, in stages one has all parameters: names make no difference between them. State that every rank
has whole (`--data-parallel-sharding none`) is saved as megatron-core does it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from megatron.core.optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import param_group_identifier_keys

from megavlm.optim.sharded_optimizer import ShardedOptimizer
from megavlm.optim.shards import ParamShard, shard_layout

_KINDS = ("param", "exp_avg", "exp_avg_sq")  # master weights and moments, as checkpoints name them


def param_shards(optimizer: Any, entries: Mapping[str, Any]) -> list[ParamShard]:
    """This rank's part of each parameter whose state ranks share, sharded as `entries` say; else nothing."""
    parts = _parts(optimizer)
    _begin_state(parts)
    of = {id(entry.data): entry for entry in entries.values()}
    shards: list[ParamShard] = []
    for part in parts:
        if isinstance(part, ShardedOptimizer):
            shards += part.param_shards()
        elif isinstance(part, DistributedOptimizer) and not part.is_stub_optimizer:
            for param in part.model_param_gbuf_map:
                run, replica = part._get_model_param_range_map(param)["param"], part.distributed_optimizer_instance_id
                layout = shard_layout(of[id(param)], run.start, run.end, replica=replica)
                shards.append(ParamShard(param, layout, part._get_main_param_and_optimizer_states(param)))
    return shards


def sharded_optimizer_state(
    optimizer: Any,
    entries: Mapping[str, Any],
    shards: Sequence[ParamShard],
    *,
    loading: bool,
    metadata: Mapping[str, Any],
) -> dict[str, Any]:
    """What is saved, or filled in place when loading, where this rank holds `shards` of shared state."""
    parts = _parts(optimizer)
    if not _is_shared(parts):  # parameter groups list their parameters by number: each part keeps its own
        states = [part.sharded_state_dict(dict(entries), is_loading=loading, metadata=dict(metadata)) for part in parts]
        return states[0] if len(states) == 1 else {"parts": dict(enumerate(states))}
    tensors = [
        tensor
        for each in shards
        for kind in _KINDS
        for tensor in each.layout.parts(each.state[kind], prefix=f"optimizer.state.{kind}.")
    ]
    return {"optimizer": {"param_groups": _groups(parts)}, "param_state": dict(enumerate(tensors))}


def load_optimizer_state(optimizer: Any, loaded: Mapping[str, Any]) -> None:
    """Take over what was loaded into the form that `sharded_optimizer_state` gave."""
    parts = _parts(optimizer)
    if _is_shared(parts):  # tensors are in their places
        step = max(int(group.get("step", 0)) for group in loaded["optimizer"]["param_groups"])
        for group in (group for part in parts for group in part.param_groups):
            group["step"] = step
        return
    for index, part in enumerate(parts):
        part.load_state_dict(dict(loaded) if len(parts) == 1 else loaded["parts"][index])


def _groups(parts: list[Any]) -> list[dict[str, Any]]:
    """The options of all parameter groups, and how many steps were made: rank 0 writes them for all.

    A fused optimizer counts no steps in groups of which its rank holds nothing: some rank has counted them.
    """
    groups = [group for part in parts for group in part.param_groups]
    steps: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(steps, max((int(group["step"]) for group in groups), default=0))
    options = {tuple(group.get(key) for key in param_group_identifier_keys): group for group in groups}
    return [
        {**{name: value for name, value in group.items() if name != "params"}, "step": max(steps)}
        for group in options.values()
    ]


def _begin_state(parts: list[Any]) -> None:
    """Give an optimizer that never stepped (it is new, or every step overflowed) the zeros that it begins with.

    For loading megatron-core does so itself, but on the device, where moments that belong to the host may not fit.
    """
    for part in parts:
        if not part.is_stub_optimizer:
            part.init_state_fn(part.optimizer, part.config)
            for group in part.optimizer.param_groups:
                group.setdefault("step", 0)


def loss_scale_state(optimizer: Any) -> dict[str, Any] | None:
    """Loss scale and its counters in fp16, else None. Ranks agree on them, also those that train nothing, whose
    optimizer megavlm cannot ask megatron-core to save.
    """
    scaler = getattr(optimizer.chained_optimizers[0], "grad_scaler", None)  # fp32 optimizers have no such field
    return None if scaler is None else {**scaler.state_dict(), "scale": float(scaler.scale)}


def load_loss_scale(optimizer: Any, loaded: Mapping[str, Any] | None) -> None:
    """Go on with a saved loss scale; a checkpoint of another precision has none, and leaves the initial one."""
    for part in optimizer.chained_optimizers:
        scaler = getattr(part, "grad_scaler", None)
        if loaded is not None and scaler is not None:
            scaler.load_state_dict({**loaded, "scale": scaler.scale.new_tensor([loaded["scale"]])})


def _parts(optimizer: Any) -> list[Any]:
    """megatron-core's optimizers, without those of nothing where there are others."""
    parts = list(optimizer.chained_optimizers)
    return [part for part in parts if not part.is_stub_optimizer] or parts[:1]


def _is_shared(parts: list[Any]) -> bool:
    return any(isinstance(part, (DistributedOptimizer, ShardedOptimizer)) for part in parts)
