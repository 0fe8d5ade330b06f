"""Save and load a whole run in megatron-core's distributed checkpoint format, on any layout.

A checkpoint has parameters and optimizer state as sharded tensors under global names (they reshard), the common
state once (iteration, data position, optimizer steps), a description of model and layout, and each rank's random
states (restored only on the same layout and kind of device, since others have other generators).

Optimizer state does not depend on the sharding or on the number of optimizers: each rank writes and reads its shards of
master weights and moments as parts of global tensors under the parameters' names (`parallel/shards.py`); nothing is
gathered. A colocated encoder has its own optimizer, while an encoder in pipeline stages shares one with the language
model; the names are the same.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.optimizer.optimizer import param_group_identifier_keys
from torch import Tensor

from megavlm.arch.plan import Plan
from megavlm.checkpoint import reading
from megavlm.checkpoint.items import STATE
from megavlm.checkpoint.saving import Saver
from megavlm.checkpoint.summary import describe, read_summary
from megavlm.config.derived import fp8_in, layer_precision
from megavlm.config.schema import Config
from megavlm.errors import UserError
from megavlm.model.specs import language_config, vision_config
from megavlm.model.vlm import VLMChunk
from megavlm.optim.elementwise import AVERAGE
from megavlm.optim.fully_sharded import FullyShardedChunk
from megavlm.optim.master_weights import average, give_model, held_layouts
from megavlm.parallel.groups import Groups, random_states, set_random_states
from megavlm.parallel.rendezvous import from_rank_0, of_all_ranks
from megavlm.parallel.shards import ParamShard, local_part
from megavlm.precision.fp8_state import (
    entries_to_load,
    entries_to_save,
    history_of,
    prepare,
    restore,
    sharded_histories,
)

# Moments in the shape of their parameters, so that TP, PP and DP may all change.
_METADATA = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}


@dataclass(frozen=True)
class Trained:
    """The objects whose state a checkpoint saves on this rank: chunks in their DP wrappers, and the optimizer."""

    wrapped: Sequence[Any]
    optimizer: Any
    groups: Groups

    @property
    def chunks(self) -> list[VLMChunk | FullyShardedChunk]:
        """Return the chunks without megatron-core's wrapper; fully sharded chunks have none."""
        return [each if isinstance(each, FullyShardedChunk) else getattr(each, "module", each) for each in self.wrapped]


@dataclass(frozen=True)
class Position:
    """The progress of a run: its state except tensors and random generators."""

    iteration: int
    loader: dict[str, Any]  # `state_dict` of the data loader
    samples_read: int = 0
    samples_skipped: int = 0
    bad_steps: dict[str, Any] = field(default_factory=dict)  # `state_dict` of `BadSteps`


def save(
    trained: Trained,
    position: Position,
    *,
    config: Config,
    plan: Plan,
    saver: Saver,
    data: Mapping[str, Any] | None = None,
    metrics: Mapping[str, float] | None = None,
) -> None:
    """Start to save a checkpoint; every rank calls it. Training may go on at once. A save with NaN or infinity fails.

    `data` identifies the data, on which the meaning of `position` depends (`data_identity`); `metrics` are those of
    the iteration.
    """
    saver.wait()  # no rank passes the next collective before the previous save has ended
    state = _sharded_state(trained, loading=False)
    state["position"] = asdict(position)
    state["loss_scale"] = loss_scale_state(trained.optimizer)
    state["fp8"] = _sharded_histories(trained) if history_of(config) else {}
    consumed = position.loader.get("consumed_samples")
    whose = {"data": data or {}, "metrics": metrics or {}}
    summary = describe(config, plan, iteration=position.iteration, consumed_samples=consumed, **whose)
    summary["random"] = _sizes(state["random"])
    summary["rounded"] = config.parallel.compress_weights == "none"
    with _quiet():
        share = saver.division.share(state, group=trained.groups.dp_cp, metadata=dict(_METADATA))
        saver.begin(share, summary)


def load(trained: Trained, folder: Path, *, config: Config, plan: Plan) -> Position:
    """Load a checkpoint, which must pass `check_fits`, from any layout and return its position.

    Raises UserError for a checkpoint that cannot be loaded.
    """
    summary = from_rank_0(partial(read_summary, folder), dict[str, Any]())
    follow = summary.get("rounded") is True and weights_follow(config)
    state = _sharded_state(trained, loading=True, follow=follow)
    resumes_random = summary["plan"] == plan.to_json() and summary.get("random") == _sizes(state["random"])
    if not resumes_random:
        del state["random"]
    begins_averages = config.optimizer.ema_decay > 0 and not summary.get("averages", False)
    if begins_averages:
        state["optimizer"] = without(AVERAGE, state["optimizer"])
    history = history_of(config)
    resumes_history = history is not None and summary.get("fp8") == history
    if resumes_history:
        _prepare_histories(trained, config)
        state["fp8"] = _sharded_histories(trained)
    with _quiet():
        loaded = reading.load(state, folder, reading.sharing_groups(trained.chunks))
    common = folder / STATE
    if missing := [name for name in ("optimizer", "position") if not isinstance(loaded.get(name), dict)]:
        raise UserError(f"{common} has no {' and no '.join(missing)} of a run: use another checkpoint")
    for index, chunk in enumerate(trained.chunks):
        chunk.load_state_dict(loaded.get(f"chunk{index}", {}), strict=not follow)
        if resumes_history:
            restore(chunk, loaded["fp8"])
    try:
        load_optimizer_state(trained.optimizer, loaded["optimizer"])
        if follow:
            give_model(trained.optimizer, trained.wrapped)
        if begins_averages:
            average(trained.optimizer, decay=0.0)
        load_loss_scale(trained.optimizer, loaded.get("loss_scale"))
        position = Position(**loaded["position"])
        if resumes_random:
            set_random_states(_nested(loaded["random"]))
    except (LookupError, TypeError, AttributeError) as error:  # values of a file that somebody else has written
        what = f"{type(error).__name__}: {error}"
        raise UserError(f"{common} is not as a run writes it ({what:.200}): use another checkpoint") from error
    return position


def _sharded_state(trained: Trained, *, loading: bool, follow: bool = False) -> dict[str, Any]:
    """Return the sharded state dict to save or, when `loading`, to fill.

    With `follow`, a load leaves out trained weights, which follow from master weights.
    """
    metadata = {**_METADATA, "dp_cp_group": trained.groups.dp_cp}
    chunks = {
        f"chunk{index}": chunk.sharded_state_dict(metadata=metadata) for index, chunk in enumerate(trained.chunks)
    }
    parameters = {key: entry for chunk in chunks.values() for key, entry in chunk.items()}
    shards = param_shards(trained.optimizer, parameters)
    optimizer = sharded_optimizer_state(trained.optimizer, shards)
    for chunk, (name, entries) in zip(trained.chunks, chunks.items(), strict=True):
        if not loading:
            chunks[name] = entries_to_save(entries, shards)
            continue
        skipped = chunk.trained if isinstance(chunk, FullyShardedChunk) else {}
        chunks[name] = {
            key: entry
            for key, entry in _filled_in_place(entries_to_load(entries)).items()
            if key.partition("/")[0] not in skipped and not (follow and entry.data.requires_grad)
        }
    return {
        **chunks,
        "optimizer": optimizer,
        "random": _sharded_random_states(),
    }


def _sharded_random_states() -> dict[str, ShardedTensor]:
    """Return the states of this rank's random generators, each as the row of this rank in a tensor [ranks, bytes]."""
    states = random_states()
    flat = {**{f"tracker.{name}": state for name, state in states.pop("tracker").items()}, **states}
    row = (0, dist.get_rank(), dist.get_world_size())
    return {
        name: ShardedTensor.from_rank_offsets(f"random.{name}", state[None].clone(), row)
        for name, state in flat.items()
    }


def _nested(loaded: Mapping[str, Tensor]) -> dict[str, Any]:
    """Convert loaded tensors of `_sharded_random_states` to the argument of `set_random_states`."""
    states: dict[str, Any] = {"tracker": {}}
    for name, state in loaded.items():
        of_tracker = name.startswith("tracker.")
        (states["tracker"] if of_tracker else states)[name.removeprefix("tracker.")] = state[0]
    return states


def _sizes(random: Mapping[str, ShardedTensor]) -> dict[str, int]:
    return {name: each.local_shape[-1] for name, each in random.items()}


def _filled_in_place(entries: Mapping[str, Any]) -> dict[str, Any]:
    """Return entries of a sharded state dict that do not join slices after a load, as they are views of one tensor."""
    return {
        key: replace(entry, merge_fn=lambda _, whole=entry.data: whole)
        if isinstance(entry, ShardedTensorFactory)
        else entry
        for key, entry in entries.items()
    }


def _sharded_histories(trained: Trained) -> dict[str, Any]:
    replica = trained.groups.dp_cp.rank() * trained.groups.dims.tp + trained.groups.coords.tp
    return {key: entry for chunk in trained.chunks for key, entry in sharded_histories(chunk, replica=replica).items()}


def _prepare_histories(trained: Trained, config: Config) -> None:
    from megatron.core.fp8_utils import get_fp8_recipe  # exists only with Transformer Engine

    of_part = language_config if fp8_in("language", config) else vision_config
    fp8_config = of_part(config, tp=trained.groups.dims.tp)
    for chunk in trained.chunks:
        prepare(
            chunk,
            runs_in_fp8=lambda name: layer_precision(".".join(name.split(".")[:3]), config) == "fp8",
            recipe=lambda: get_fp8_recipe(fp8_config),
        )


class _quiet:
    """Silences megatron-core's log lines during saves and loads: megavlm prints a line itself."""

    def __enter__(self) -> None:
        logging.disable(logging.WARNING)

    def __exit__(self, *_: Any) -> None:
        logging.disable(logging.NOTSET)


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
            # The scale grows at the last step of a window, which a count beyond a shorter window would never meet.
            counted = min(loaded["growth_tracker"], scaler.growth_interval - 1)
            scale = scaler.scale.new_tensor([loaded["scale"]])
            scaler.load_state_dict({**loaded, "scale": scale, "growth_tracker": counted})


def _parts(optimizer: Any) -> list[Any]:
    """Return the chained megatron-core optimizers that have parameters; the first one if none has."""
    parts = list(optimizer.chained_optimizers)
    return [part for part in parts if not part.is_stub_optimizer] or parts[:1]
