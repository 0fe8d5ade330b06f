"""Read the options with which a resumed run was started. No torch."""

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

# `run` and `logging` change neither computation nor data; other model sizes are refused, with a message of their own.
_ASIDE = ("run", "logging", "model.vision", "model.projector", "model.language")
_LARGEST = 2**19  # bytes of a configuration


def as_begun(config: Config) -> Config:
    """Return the configuration with each unset option of `start_defaults` at its value in the run that is resumed.

    Another version's table of defaults, or a longer run, must not change the learning rate of a run that is under way.
    If the run folder is the same, the options that differ from the last start are printed.
    """
    options, run_dir = config.checkpoint, Path(config.run.run_dir)
    own, file = bool(folders.checkpoints(run_dir / "checkpoints")), run_dir / "config.yaml"
    if own and file.exists():
        return _with_values_in(config, file, prints=True)
    # A fetched checkpoint that has refused the options of a start has no file beside it.
    if options.checkpoint_dir is not None and (stored := stored_configuration(options.checkpoint_dir)) is not None:
        return _with_stored(config, stored)
    if own or options.load is None:
        return config
    if is_url(options.load):
        stored = stored_configuration(options.load)
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


def stored_configuration(url: str) -> bytes | None:
    """Return the content of config.yaml of a run in a store; None if the file or a complete checkpoint is missing."""
    try:
        store, _ = remote.place_of(url)
        return store.read("config.yaml", at_most=_LARGEST) if remote.complete_in(store) else None
    except StoreError:  # the download of the checkpoint reports the error
        return None


def changed_options(before: Config, now: Config) -> str | None:
    """Return a message that lists the options whose values differ between `before` and `now`; None if none differs.

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
    if now.train.epochs is not None and before.train.global_batch_size != now.train.global_batch_size:
        bend += "; --epochs counts all steps as of this batch, so that the run trains on more or less than that"
    return f"this run goes on with other options: {', '.join(changed)}{bend}"


def _bends(before: Config, now: Config) -> bool:
    """Return whether the learning rate jumps: its decay ends at the last step, and the last step has moved."""
    optimizer = now.optimizer
    moved = (before.train.train_iters, before.train.epochs) != (now.train.train_iters, now.train.epochs)
    return moved and not is_set(optimizer, "lr_decay_iters") and optimizer.lr_decay_style != "constant"


def _shown(value: Any) -> str:
    if value is None or value == ():
        return "default"
    if isinstance(value, tuple):
        return " ".join(str(getattr(each, "path", each)) for each in value)
    return f"{value:g}" if isinstance(value, float) else str(value)
