"""Save and load optimizer state as tensors that do not depend on the sharding or on the number of optimizers.

Each rank writes and reads its shards of master weights and moments as parts of global tensors under the parameters'
names (`parallel/shards.py`); nothing is gathered. A colocated encoder has its own optimizer, while an encoder in
pipeline stages shares one with the language model; the names are the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron.core.optimizer.optimizer import param_group_identifier_keys

from megavlm.config.schema import Config
from megavlm.optim.master_weights import held_layouts
from megavlm.parallel.rendezvous import of_all_ranks
from megavlm.parallel.shards import ParamShard, local_part


def param_shards(optimizer: Any, entries: Mapping[str, Any]) -> list[ParamShard]:
    """Return this rank's shard of each trained parameter, with the optimizer state of the shard.

    `entries` is the model's sharded state dict.
    """
    parts = _parts(optimizer)
    _begin_state(parts)
    of = {id(entry.data): entry for entry in entries.values()}
    return [
        ParamShard(param, layout, {"param": local_part(weights), **part.optimizer.state[weights]})
        for part in parts
        for param, weights, layout in held_layouts(part, of)
    ]


def sharded_optimizer_state(optimizer: Any, shards: Sequence[ParamShard]) -> dict[str, Any]:
    """Return an optimizer's sharded state dict, to save it or to load into it in place.

    `shards` is the result of `param_shards`.
    """
    tensors = [
        tensor
        for each in shards
        for kind, held in each.state.items()  # master weights and moments
        for tensor in each.layout.parts(held, prefix=f"optimizer.state.{kind}.")
    ]
    return {"optimizer": {"param_groups": _groups(_parts(optimizer))}, "param_state": dict(enumerate(tensors))}


def without(kind: str, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return an optimizer's sharded state dict without one kind of state, which a checkpoint may lack."""
    prefix = f"optimizer.state.{kind}."
    kept = {number: held for number, held in state["param_state"].items() if not held.key.startswith(prefix)}
    return {**state, "param_state": kept}


def weights_follow(config: Config) -> bool:
    """Return whether trained weights equal their rounded master weights, so that a load can gather them from these."""
    return config.parallel.compress_weights == "none" and not config.precision.fp8_param_gather


def load_optimizer_state(optimizer: Any, loaded: Mapping[str, Any]) -> None:
    """Set the number of steps from `loaded`, the loaded state dict; its tensors were filled in place already."""
    step = max(int(group.get("step", 0)) for group in loaded["optimizer"]["param_groups"])
    for group in (group for part in _parts(optimizer) for group in part.param_groups):
        group["step"] = step


def _groups(parts: list[Any]) -> list[dict[str, Any]]:
    """Return the options of all parameter groups, with the number of optimizer steps. Rank 0 writes them for all ranks.

    A fused optimizer counts no steps in groups without parameters on its rank, so the maximum over ranks is taken.
    """
    groups = [group for part in parts for group in part.param_groups]
    steps = of_all_ranks(max((int(group["step"]) for group in groups), default=0))
    options = {tuple(group.get(key) for key in param_group_identifier_keys): group for group in groups}
    return [
        {**{name: value for name, value in group.items() if name != "params"}, "step": max(steps)}
        for group in options.values()
    ]


def _begin_state(parts: list[Any]) -> None:
    """Initialize the state of optimizers that never stepped (new ones, or every step overflowed) with zeros.

    megatron-core initializes it on a load, but on the device, where moments that are offloaded to the host may not fit.
    """
    for part in parts:
        if not part.is_stub_optimizer:
            part.init_state_fn(part.optimizer, part.config)
            for group in part.optimizer.param_groups:
                group.setdefault("step", 0)


def loss_scale_state(optimizer: Any) -> dict[str, Any] | None:
    """Return fp16's loss scale and its counters, which are equal on all ranks; None for other types.

    megatron-core cannot save them on ranks that train nothing.
    """
    scaler = getattr(optimizer.chained_optimizers[0], "grad_scaler", None)  # fp32 optimizers have no such field
    return None if scaler is None else {**scaler.state_dict(), "scale": float(scaler.scale)}


def load_loss_scale(optimizer: Any, loaded: Mapping[str, Any] | None) -> None:
    """Set the loss scale from a checkpoint. A checkpoint of another precision has none: the initial scale stays."""
    for part in optimizer.chained_optimizers:
        scaler = getattr(part, "grad_scaler", None)
        if loaded is not None and scaler is not None:
            scaler.load_state_dict({**loaded, "scale": scaler.scale.new_tensor([loaded["scale"]])})


def _parts(optimizer: Any) -> list[Any]:
    """Return the chained megatron-core optimizers that have parameters; the first one if none has."""
    parts = list(optimizer.chained_optimizers)
    return [part for part in parts if not part.is_stub_optimizer] or parts[:1]
