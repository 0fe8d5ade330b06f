"""Read what the run that is continued began with. No torch."""

from __future__ import annotations

from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from megavlm.checkpoint import folders, remote
from megavlm.config.schema import Config
from megavlm.errors import UserError
from megavlm.rules.check import idle, without_idle
from megavlm.rules.defaults import is_set, with_values_of
from megavlm.rules.fields import options, value_at
from megavlm.rules.load import from_yaml_file
from megavlm.storage import is_url
from megavlm.storage.store import StoreError

# The former neither compute nor read anything else; other sizes of the model are refused, with a line of their own.
_ASIDE = ("run", "logging", "model.vision", "model.projector", "model.language")
_LARGEST = 2**19  # bytes of a configuration


def as_begun(config: Config) -> Config:
    """Return the configuration with the values of the run that it continues for options that start anew else.

    Those of `start_defaults` that nobody set: another version's table, or a longer run, must not change the learning
    rate of a run that is under way. What differs from the last time is printed, if the run folder is the same.
    """
    options, run_dir = config.checkpoint, Path(config.run.run_dir)
    if folders.checkpoints(run_dir / "checkpoints"):
        return _with_values_in(config, run_dir / "config.yaml", prints=True)
    if options.checkpoint_dir is not None and (stored := _stored(options.checkpoint_dir)) is not None:
        return _with_stored(config, stored)
    if options.load is None:
        return config
    if is_url(options.load):
        stored = _stored(options.load)
        return config if stored is None else _with_stored(config, stored)
    given = Path(options.load)
    places = [place for place in (given, given.parent.parent) if folders.checkpoints(place / "checkpoints")]
    return _with_values_in(config, places[0] / "config.yaml") if places else config


def _with_stored(config: Config, content: bytes) -> Config:
    with NamedTemporaryFile(suffix=".yaml") as file:
        file.write(content)
        file.flush()
        return _with_values_in(config, Path(file.name))


def _with_values_in(config: Config, file: Path, *, prints: bool = False) -> Config:
    if not file.exists():
        return config
    try:
        earlier = from_yaml_file(file)
    except UserError as error:
        print(f"warning: {error}: options that are not given take their defaults", flush=True)
        return config
    now = with_values_of(config, earlier)
    now = without_idle(now, {option.path for option, _ in idle(config)})  # as --no-save leaves its --save-interval
    if prints and (line := changed_options(earlier, now)):
        print(line, flush=True)
    return now


def _stored(url: str) -> bytes | None:
    """Return the config.yaml beside the checkpoints of a store; None if there is none, or no checkpoint."""
    try:
        store, _ = remote.place_of(url)
        return store.read("config.yaml", at_most=_LARGEST) if remote.complete_in(store) else None
    except StoreError:  # who copies the checkpoint says what is wrong
        return None


def changed_options(before: Config, now: Config) -> str | None:
    """Return a line with each option that has another value than before, or None if there is none.

    Both configurations are as given, with the values of `start_defaults`.
    """
    changed = [
        f"{option.name} {_shown(new)} (before: {_shown(old)})"
        for option in options()
        if option.section not in _ASIDE
        and (new := value_at(now, option.path)) != (old := value_at(before, option.path))
    ]
    if not changed:
        return None
    bend = "; from here, the learning rate follows the schedule of the new length" if _bends(before, now) else ""
    return f"this run goes on with other options: {', '.join(changed)}{bend}"


def _bends(before: Config, now: Config) -> bool:
    """Return whether the learning rate jumps, because it decays until the last step and that has moved."""
    optimizer = now.optimizer
    moved = (before.train.train_iters, before.train.epochs) != (now.train.train_iters, now.train.epochs)
    return moved and not is_set(optimizer, "lr_decay_iters") and optimizer.lr_decay_style != "constant"


def _shown(value: Any) -> str:
    if value is None or value == ():
        return "default"
    if isinstance(value, tuple):
        return " ".join(str(getattr(each, "path", each)) for each in value)
    return f"{value:g}" if isinstance(value, float) else str(value)
