"""An optimizer's state in a checkpoint: the same keys however many optimizers a run's parameters are divided among.

A colocated encoder has an optimizer of its own, sharded over the world; in stages one optimizer has all parameters.
Moments are named after their parameters, and parameter groups after what sets them apart, so either reads the other's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from megatron.core.optimizer.optimizer import param_group_identifier_keys

from megavlm.backend.adamw import AdamW
from megavlm.optim.sharded_optimizer import ShardedOptimizer


def sharded_optimizer_state(
    optimizer: Any, parameters: Mapping[str, Any], *, loading: bool, metadata: Mapping[str, Any]
) -> dict[str, Any]:
    """What megatron-core saves, or fills when loading, for an optimizer of parameters sharded as `parameters` say."""
    _begin_state(optimizer, loading=loading)
    with _whole_buckets(optimizer):
        states = [
            part.sharded_state_dict(dict(parameters), is_loading=loading, metadata=dict(metadata))
            for part in _parts(optimizer)
        ]
    if len(states) == 1:
        return states[0]
    if not _is_sharded(optimizer):  # parameter groups list their parameters by number: each part keeps its own
        return {"parts": dict(enumerate(states))}
    groups = {_identity(group): group for state in states for group in state["optimizer"]["param_groups"]}
    return {
        **states[0],
        "optimizer": {**states[0]["optimizer"], "param_groups": list(groups.values())},
        "param_state": {index: state["param_state"] for index, state in enumerate(states)},
    }


def load_optimizer_state(optimizer: Any, loaded: Mapping[str, Any]) -> None:
    """Take over what was loaded into the form that `sharded_optimizer_state` gave."""
    parts = _parts(optimizer)
    if len(parts) == 1:
        parts[0].load_state_dict(dict(loaded))
        return
    for index, part in enumerate(parts):
        if _is_sharded(optimizer):
            part.load_state_dict({**loaded, "param_state": loaded["param_state"][index]})
        else:
            part.load_state_dict(loaded["parts"][index])


def _begin_state(optimizer: Any, *, loading: bool) -> None:
    """Give an optimizer that never stepped (every step so far overflowed) the zeros that it would have begun with.

    For loading megatron-core does so itself, but on the device, where moments that belong to the host may not fit.
    """
    for part in _parts(optimizer):
        if part.is_stub_optimizer or (loading and not isinstance(part.optimizer, AdamW)):
            continue
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


def _is_sharded(optimizer: Any) -> bool:
    return bool(_buffers(optimizer)) or any(isinstance(p, ShardedOptimizer) for p in optimizer.chained_optimizers)


def _identity(group: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(group[key] for key in param_group_identifier_keys)


@contextmanager
def _whole_buckets(optimizer: Any) -> Iterator[None]:
    """Let megatron-core gather moments with the padding of its buckets left in.

    It joins the buckets of a gradient buffer without their padding, but then cuts parameters out by their offsets in
    the padded buffer: from the second bucket on (tied embeddings, overlapped reduction) every parameter would be
    saved with its neighbour's numbers. Told that nothing is padding, both sides count alike.
    """
    padded = [part for buffer in _buffers(optimizer) for part in (buffer, *buffer.buckets)]
    true_sizes = [part.numel_unpadded for part in padded]
    try:
        for part in padded:
            part.numel_unpadded = part.numel if hasattr(part, "buckets") else part.grad_data.numel()
        yield
    finally:
        for part, size in zip(padded, true_sizes, strict=True):
            part.numel_unpadded = size


def _buffers(optimizer: Any) -> list[Any]:
    """Gradient buffers that a distributed optimizer shards; none for other optimizers."""
    return [buffer for part in optimizer.chained_optimizers for buffer in getattr(part, "buffers", [])]
