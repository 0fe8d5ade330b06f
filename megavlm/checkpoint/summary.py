"""Describe a checkpoint in `megavlm.json`, read the description, and check that the checkpoint belongs to a run."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megavlm.arch.plan import Plan
from megavlm.checkpoint.manifest import SUMMARY
from megavlm.config.lora_config import frozen_parts
from megavlm.config.messages import shown
from megavlm.config.schema import Config
from megavlm.data.records import difference
from megavlm.errors import UserError
from megavlm.json_files import OBJECT, TEXT, check, read_json, whole
from megavlm.precision.fp8_state import history_of
from megavlm.rules.check import out_of_range
from megavlm.rules.defaults import resolve
from megavlm.rules.extensions import extensions_of, missing_extensions
from megavlm.rules.fields import options
from megavlm.rules.load import as_data, from_dict

FORMAT = 2
_LARGEST = 2**26  # bytes of a description
_EXPECTED = {
    **dict.fromkeys(("model", "plan", "lora", "data"), OBJECT),
    **dict.fromkeys(("data_parallel_sharding", "optimizer"), TEXT),
    "iteration": whole(0, 2**62),
}


def describe(
    config: Config,
    plan: Plan,
    *,
    iteration: int,
    consumed_samples: int | None,
    data: Mapping[str, Any],
    metrics: Mapping[str, float],
) -> dict[str, Any]:
    """Return the content of a checkpoint's `megavlm.json`.

    `data` identifies the data, on which the meaning of the data position depends (`data_identity`); `metrics` are
    those of the iteration.
    """
    return {
        "format": FORMAT,
        "iteration": iteration,
        "consumed_samples": consumed_samples,
        "plan": plan.to_json(),
        "model": _jsonable(as_data(config.model, chosen=True)),
        "lora": _jsonable(asdict(config.lora)),
        "extensions": list(extensions_of(config)),
        "fp8": history_of(config),
        "data_parallel_sharding": config.parallel.data_parallel_sharding,
        "optimizer": config.optimizer.kind,
        "averages": config.optimizer.ema_decay > 0,
        "data": dict(data),
        "keep_best": [config.checkpoint.keep_best, config.checkpoint.keep_best_mode],
        "metrics": {name: value for name, value in metrics.items() if math.isfinite(value)},
    }


def read_summary(folder: Path) -> dict[str, Any]:
    """Return the content of a checkpoint's `megavlm.json`. Raises UserError if it is missing, invalid or of another
    format.
    """
    try:
        summary = read_json(folder / SUMMARY, at_most=_LARGEST)
    except UserError as error:
        raise UserError(f"{folder} is no megavlm checkpoint: {error}") from error
    if summary.get("format") != FORMAT:
        raise UserError(f"{folder} has checkpoint format {shown(summary.get('format'))}; this megavlm reads {FORMAT}")
    check(summary, _EXPECTED, str(folder / SUMMARY))
    if missing := [name for name in ("model", "plan") if summary.get(name) is None]:
        raise UserError(f"{folder} is no megavlm checkpoint: its {SUMMARY} has no {missing[0]}")
    return summary


def model_of(summary: Mapping[str, Any], folder: Path) -> Config:
    """Return the configuration of a checkpoint's model and adapters. Raises UserError if it is not valid."""
    lacking = missing_extensions(summary.get("extensions"))
    try:
        saved = from_dict({name: summary[name] for name in ("model", "lora") if summary.get(name) is not None})
        if wrong := next(out_of_range(saved), None):
            raise UserError(wrong)
        return resolve(saved)
    except (UserError, ArithmeticError, TypeError, ValueError) as error:
        if lacking is not None:
            raise UserError(f"{folder} was made with {lacking}: add that") from None
        raise UserError(f"{folder / SUMMARY} describes no model: {error}") from error


def check_model(summary: dict[str, Any], config: Config, folder: Path) -> None:
    """Raise UserError if a checkpoint has another model than the run; the message names the first different option."""
    made_with = model_of(summary, folder).model
    expected, saved = (dict(_leaves(as_data(model, chosen=True))) for model in (config.model, made_with))
    # The projector last: its width follows from the language model's, whose option is the one to name.
    for name in sorted(expected, key=lambda name: name.startswith("projector.")):
        if (before := saved.get(name)) != (value := expected[name]) and name.rpartition(".")[2] not in _MAY_CHANGE:
            file = folder.parent.parent / "config.yaml"
            of_run = f" (--config {file} has all that it was made with)" if file.is_file() else ""
            raise UserError(
                f"checkpoint {folder} was made with model.{name} = {before}, but this run has {value}: "
                f"use the saved value{of_run}, or another --run-dir to start anew"
            )


def _leaves(data: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted name, value) for each value of nested mappings."""
    for name, value in data.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def check_fits(summary: dict[str, Any], config: Config, folder: Path) -> None:
    """Raise UserError if a checkpoint's model, adapters or optimizer state do not fit this run's configuration."""
    if (lacking := missing_extensions(summary.get("extensions"))) is not None:
        raise UserError(f"checkpoint {folder} was made with {lacking}: add that to go on")
    check_model(summary, config, folder)
    if (before := summary.get("optimizer")) != config.optimizer.kind:
        raise UserError(
            f"checkpoint {folder} was made with --optimizer {shown(before)}, whose state {config.optimizer.kind} does "
            "not have: give the same option, or export the weights and begin with them (--init-from)"
        )
    saved = summary.get("lora") or {}
    for name, value in _jsonable(asdict(config.lora)).items():
        if (before := saved.get(name)) != value:
            (option,) = (option for option in options() if option.path == ("lora", name))
            raise UserError(
                f"checkpoint {folder} was made with {option.name} {before}, but this run has {value}: use the saved "
                "value, or start another --run-dir"
            )
    if sorted(frozen := model_of(summary, folder).model.freeze or ()) != sorted(frozen_parts(config)):
        raise UserError(
            f"checkpoint {folder} was made with --freeze {' '.join(frozen) or '(nothing)'}: "
            "its optimizer state belongs to those parameters; give the same --freeze"
        )


def check_data(summary: dict[str, Any], data: Mapping[str, Any], folder: Path, *, accept: bool) -> str | None:
    """Raise UserError if a checkpoint was trained on other data or, with `accept`, return a warning."""
    saved = summary.get("data")
    changed = difference(saved, dict(data)) if isinstance(saved, dict) else None
    if changed is None:
        return None
    made = f"checkpoint {folder} was made with {changed}: its place in the data means other samples"
    if accept:
        return f"{made}; --accept-changed-data goes on from there"
    raise UserError(f"{made}. Use what it had, or give --accept-changed-data")


# Options that may change on resume: the saved tensors keep their meaning.
_MAY_CHANGE = (
    *("published", "init_method_std", "attention_dropout", "hidden_dropout", "freeze"),
    *("pooling", "temperature", "symmetric", "matryoshka_widths", "query_prefix", "document_prefix"),
    *("aux_loss_coeff", "z_loss_coeff", "router_bias_update_rate", "router_force_load_balancing"),
    "mtp_loss_scaling_factor",
)


def _jsonable(value: Any) -> Any:
    return json.loads(json.dumps(value))
