"""Weights & Biases and MLflow (`--tracker`): which there are, and under which id each knows a run folder."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from megavlm.config.schema import Config
from megavlm.errors import UserError
from megavlm.files import replace_file
from megavlm.metrics.background import Background
from megavlm.metrics.callback import Callback
from megavlm.metrics.secrets import without_secrets
from megavlm.paths import read_bytes
from megavlm.rules.fields import options, value_at

ID_FILE = "{}-run-id.txt"
# Name → module and class of the tracker. The package that it needs and its extra of pyproject.toml have the same name.
_TRACKERS = {
    "wandb": ("megavlm.metrics.wandb_tracker", "WandbTracker"),
    "mlflow": ("megavlm.metrics.mlflow_tracker", "MlflowTracker"),
}
_PACKAGES = {"wandb": "wandb", "mlflow": "mlflow-skinny"}


def check_installed(names: Sequence[str]) -> None:
    """Raise UserError if the package of a tracker is missing."""
    for name in names:
        if find_spec(name) is None:
            raise UserError(f"--tracker {name} needs a package that is missing: pip install {_PACKAGES[name]}")


def trackers_of(config: Config, run_dir: Path) -> list[Callback]:
    """Return the trackers of a run; their libraries are imported by threads of their own."""
    logging = config.logging
    name = logging.tracker_run_name or run_dir.resolve().name
    return [Background(each, partial(_make, each, logging.tracker_project, name)) for each in logging.tracker]


def _make(tracker: str, project: str, name: str) -> Callback:
    module, cls = _TRACKERS[tracker]
    made: Callback = getattr(import_module(module), cls)(project=project, name=name)
    return made


def settings_of(config: Config) -> dict[str, Any]:
    """Return all options by their key (`train.train_iters`), without secrets, for a tracker to show and to compare."""
    values = {option.key: value_at(config, option.path) for option in options()}
    plain = {
        key: [vars(each) if hasattr(each, "__dict__") else each for each in value]
        if isinstance(value, tuple)
        else value
        for key, value in values.items()
    }
    cleaned: dict[str, Any] = without_secrets(plain)
    return cleaned


def known_id(run_dir: Path, tracker: str) -> str | None:
    """Return the id under which a tracker knows the run folder; None if it does not."""
    try:
        text = read_bytes(run_dir / ID_FILE.format(tracker), at_most=1024).decode(errors="replace").strip()
    except OSError:
        return None
    return text if re.fullmatch(r"[\w-]{1,128}", text) else None


def remember_id(run_dir: Path, tracker: str, identity: str) -> None:
    """Write down the id under which a tracker knows the run folder: a run that resumes goes on under it."""
    replace_file(run_dir / ID_FILE.format(tracker), identity + "\n")
