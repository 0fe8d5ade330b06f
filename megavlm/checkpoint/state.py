"""Save and load a whole run in megatron-core's distributed checkpoint format, at any layout.

What is saved: parameters and optimizer moments as sharded tensors under global names (they reshard), the common
state once (iteration, data position, schedule position, the model and layout they belong to), and each rank's
random states (restored only on the same layout: another one has other ranks).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensorFactory
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

from megavlm.checkpoint import reading
from megavlm.checkpoint.manifest import ANNOUNCED, MANIFEST, SUMMARY
from megavlm.checkpoint.optimizer import (
    load_loss_scale,
    load_optimizer_state,
    loss_scale_state,
    param_shards,
    sharded_optimizer_state,
)
from megavlm.checkpoint.saving import Saver
from megavlm.checkpoint.writing import share_of_rank
from megavlm.config.derived import fp8_in, layer_precision
from megavlm.config.load import from_dict
from megavlm.config.lora import is_adapter
from megavlm.config.resolve import resolve
from megavlm.config.schema import Config, LoraConfig
from megavlm.data.records import difference
from megavlm.errors import UserError
from megavlm.model.specs import language_config, vision_config
from megavlm.model.vlm import VLMChunk
from megavlm.optim.fully_sharded import FullyShardedChunk
from megavlm.parallel.groups import Groups
from megavlm.planner.plan import Plan
from megavlm.precision.fp8_weights import entries_to_load, entries_to_save
from megavlm.precision.history import history_of, prepare, restore, sharded_histories

FORMAT = 1
# Moments in the shape of their parameters, so that TP, PP and DP may all change.
_METADATA = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}


@dataclass(frozen=True)
class Trained:
    """What a checkpoint saves of this rank: its chunks, maybe sharded over data-parallel ranks, and their optimizer."""

    chunks: Sequence[VLMChunk | FullyShardedChunk]
    optimizer: Any
    groups: Groups


@dataclass(frozen=True)
class Position:
    """The progress of a run: all of its state but tensors and random generators."""

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
) -> None:
    """Begin a save; every rank calls it. Training may go on at once. Raises UserError for state that is not finite.

    `data` is what the position depends on (`data_identity`).
    """
    state = _sharded_state(trained, loading=False)
    state["position"] = asdict(position)
    state["loss_scale"] = loss_scale_state(trained.optimizer)
    state["fp8"] = _sharded_histories(trained) if history_of(config) else {}
    summary = {**_summary(config, plan, position), "data": dict(data or {})}
    with _quiet():
        share = share_of_rank(state, group=trained.groups.dp_cp, metadata=dict(_METADATA))
        saver.begin(share, summary)


def load(trained: Trained, folder: Path, *, config: Config, plan: Plan) -> Position:
    """Load a checkpoint of any layout that passes `check_fits`; return its position. Raises UserError if it fails."""
    summary = read_summary(folder)
    same_layout = summary["plan"] == plan.to_json()
    state = _sharded_state(trained, loading=True)
    if not same_layout:
        del state["random"]
    history = history_of(config)
    resumes_history = history is not None and summary.get("fp8") == history
    if resumes_history:
        _prepare_histories(trained, config)
        state["fp8"] = _sharded_histories(trained)
    with _quiet():
        loaded = reading.load(state, folder)
    for index, chunk in enumerate(trained.chunks):
        chunk.load_state_dict(loaded[f"chunk{index}"])
        if resumes_history:
            restore(chunk, loaded["fp8"])
    load_optimizer_state(trained.optimizer, loaded["optimizer"])
    load_loss_scale(trained.optimizer, loaded.get("loss_scale"))
    position = Position(**loaded["position"])
    if same_layout:
        set_random_states(loaded["random"])
    return position


def is_weights_only(folder: Path) -> bool:
    """Return whether a checkpoint holds weights alone, without optimizer state and position."""
    return read_summary(folder).get("contents") == "weights"


def load_weights(chunks: Sequence[VLMChunk], *, folder: Path, config: Config) -> None:
    """Load only the parameters of a checkpoint into chunks of this layout; every rank calls it."""
    check_model(read_summary(folder), config, folder)
    wanted = {
        f"chunk{index}": {key: entry for key, entry in chunk.sharded_state_dict().items() if not is_adapter(key)}
        for index, chunk in enumerate(chunks)
    }
    with _quiet():
        loaded = reading.load(wanted, folder)
    for index, chunk in enumerate(chunks):
        chunk.load_state_dict(loaded[f"chunk{index}"], strict=False)  # without adapters, which the seed draws


def read_summary(folder: Path) -> dict[str, Any]:
    """Return a checkpoint's own description, `megavlm.json`. Raises UserError if it cannot be used."""
    try:
        summary = json.loads((folder / SUMMARY).read_text())
        if summary["format"] != FORMAT:
            raise UserError(f"{folder} has checkpoint format {summary['format']}; this megavlm reads {FORMAT}")
        missing = [name for name in ("model", "plan") if not isinstance(summary.get(name), dict)]
        if missing:
            raise ValueError(f"it has no {missing[0]}")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{folder} is no megavlm checkpoint: its {SUMMARY} cannot be read ({error})") from error
    return dict(summary)


def check_model(summary: dict[str, Any], config: Config, folder: Path) -> None:
    """Raise UserError for a checkpoint of another model, naming the first option that differs."""
    # Earlier versions saved sizes that follow from others as null.
    made_with = resolve(from_dict({"model": summary["model"]}), vocab_size=config.model.language.vocab_size).model
    expected, saved = asdict(config.model), asdict(made_with)
    # The projector last: its width follows from the language model's, whose option is the one to name.
    for section, fields in sorted(expected.items(), key=lambda item: item[0] == "projector"):
        pairs = fields.items() if isinstance(fields, dict) else [(section, fields)]
        for name, value in pairs:
            before = saved[section][name] if isinstance(fields, dict) else saved[section]
            if before != value and name not in _MAY_CHANGE:
                option = f"{section}.{name}" if isinstance(fields, dict) else name
                raise UserError(
                    f"checkpoint {folder} was made with model.{option} = {before}, but this run has {value}: "
                    "use the saved value, or another --run-dir to start anew"
                )


def check_fits(summary: dict[str, Any], config: Config, folder: Path) -> None:
    """Raise UserError for a checkpoint whose model or optimizer state does not belong to this run."""
    check_model(summary, config, folder)
    kind, placement = _sharding(summary), summary["plan"].get("placement", "stages")
    # Whole state is saved per optimizer and its parameters' number; what ranks share is saved by name.
    if (kind == "none") != (config.parallel.data_parallel_sharding == "none"):
        raise UserError(
            f"checkpoint {folder} was made with --data-parallel-sharding {kind}: give the same option to resume it"
        )
    if placement != config.placement.encoder and kind == "none":
        raise UserError(
            f"checkpoint {folder} was made with --placement {placement} --data-parallel-sharding none: give the same "
            "--placement to resume it"
        )
    saved = summary.get("lora", _jsonable(asdict(LoraConfig())))
    for name, value in _jsonable(asdict(config.lora)).items():
        if (before := saved.get(name, value)) != value:
            raise UserError(
                f"checkpoint {folder} was made with --lora-{name} {before}, but this run has {value}: use the saved "
                "value, or start another --run-dir"
            )
    if sorted(summary["model"]["freeze"]) != sorted(config.model.freeze):
        raise UserError(
            f"checkpoint {folder} was made with --freeze {' '.join(summary['model']['freeze']) or '(nothing)'}: "
            "its optimizer state belongs to those parameters; give the same --freeze"
        )


def check_data(summary: dict[str, Any], data: Mapping[str, Any], folder: Path, *, accept: bool) -> str | None:
    """Raise UserError for a checkpoint of a run on other data, or return a warning if `accept` is set."""
    saved = summary.get("data")
    changed = difference(saved, dict(data)) if isinstance(saved, dict) else None
    if changed is None:
        return None
    made = f"checkpoint {folder} was made with {changed}: its place in the data means other samples"
    if accept:
        return f"{made}; --accept-changed-data goes on from there"
    raise UserError(f"{made}. Use what it had, or give --accept-changed-data")


# They change how the run goes on, not what the saved tensors mean.
_MAY_CHANGE = ("init_method_std", "attention_dropout", "hidden_dropout", "freeze")


def _summary(config: Config, plan: Plan, position: Position) -> dict[str, Any]:
    return {
        "format": FORMAT,
        ANNOUNCED: MANIFEST,
        "iteration": position.iteration,
        "consumed_samples": position.loader.get("consumed_samples"),
        "plan": plan.to_json(),
        "model": _jsonable(asdict(config.model)),
        "lora": _jsonable(asdict(config.lora)),
        "fp8": history_of(config),
        "data_parallel_sharding": config.parallel.data_parallel_sharding,
    }


def _sharding(summary: dict[str, Any]) -> str:
    """Return `--data-parallel-sharding` of the run that wrote a checkpoint, also of an earlier version."""
    if (kind := summary.get("data_parallel_sharding")) is not None:
        return str(kind)
    return "optimizer" if summary.get("use_distributed_optimizer", True) else "none"


def _jsonable(value: Any) -> Any:
    return json.loads(json.dumps(value))


def _sharded_state(trained: Trained, *, loading: bool) -> dict[str, Any]:
    metadata = {**_METADATA, "dp_cp_group": trained.groups.dp_cp}
    chunks = {
        f"chunk{index}": chunk.sharded_state_dict(metadata=metadata) for index, chunk in enumerate(trained.chunks)
    }
    parameters = {key: entry for chunk in chunks.values() for key, entry in chunk.items()}
    shards = param_shards(trained.optimizer, parameters)
    optimizer = sharded_optimizer_state(trained.optimizer, parameters, shards, loading=loading, metadata=metadata)
    for name, chunk in chunks.items():
        chunks[name] = _filled_in_place(entries_to_load(chunk)) if loading else entries_to_save(chunk, shards)
    return {
        **chunks,
        "optimizer": optimizer,
        "random": ShardedObject("random", random_states(), (dist.get_world_size(),), (dist.get_rank(),)),
    }


def _filled_in_place(entries: Mapping[str, Any]) -> dict[str, Any]:
    """Return entries of a sharded state dict that do not join slices after a load: the slices are views of a tensor."""
    return {
        key: replace(entry, merge_fn=lambda _, whole=entry.data: whole)
        if isinstance(entry, ShardedTensorFactory)
        else entry
        for key, entry in entries.items()
    }


def _sharded_histories(trained: Trained) -> dict[str, Any]:
    replica = trained.groups.coords.dp * trained.groups.dims.tp + trained.groups.coords.tp
    return {key: entry for chunk in trained.chunks for key, entry in sharded_histories(chunk, replica=replica).items()}


def _prepare_histories(trained: Trained, config: Config) -> None:
    from megatron.core.fp8_utils import get_fp8_recipe  # there only with Transformer Engine

    of_part = language_config if fp8_in("language", config) else vision_config
    fp8_config = of_part(config, tp=trained.groups.dims.tp)
    for chunk in trained.chunks:
        prepare(
            chunk,
            runs_in_fp8=lambda name: layer_precision(".".join(name.split(".")[:3]), config) == "fp8",
            recipe=lambda: get_fp8_recipe(fp8_config),
        )


def random_states() -> dict[str, Any]:
    """Return the states of all random generators of this rank."""
    states: dict[str, Any] = {"cpu": torch.get_rng_state(), "tracker": get_cuda_rng_tracker().get_states()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def set_random_states(states: dict[str, Any]) -> None:
    """Set all random generators of this rank."""
    torch.set_rng_state(states["cpu"])
    get_cuda_rng_tracker().set_states(dict(states["tracker"]))  # a copy: the tracker changes it
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])


class _quiet:
    """Silences megatron-core's log lines on saves and loads: megavlm prints one line of its own."""

    def __enter__(self) -> None:
        logging.disable(logging.WARNING)

    def __exit__(self, *_: Any) -> None:
        logging.disable(logging.NOTSET)
