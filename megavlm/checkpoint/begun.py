"""Read what the run that is continued began with. No torch."""

from __future__ import annotations

from pathlib import Path
from tempfile import NamedTemporaryFile

from megavlm.checkpoint import folders, remote
from megavlm.config.changed import changed_options
from megavlm.config.effects import idle, without_idle
from megavlm.config.load import from_yaml_file
from megavlm.config.schema import Config
from megavlm.config.start_defaults import with_values_of
from megavlm.errors import UserError
from megavlm.storage.store import StoreError
from megavlm.storage.urls import is_url

_LARGEST = 2**19  # bytes of a configuration


def as_begun(config: Config) -> Config:
    """Return the configuration with the values of the run that it continues for options that start anew else.

    Those of `start_defaults` that nobody set: another version's table, or a longer run, must not change the learning
    rate of a run that is under way. What differs from the last time is printed, if the run folder is the same.
    """
    options, run_dir = config.checkpoint, Path(config.run.run_dir)
    if folders.checkpoints(run_dir / "checkpoints"):
        return _with_values_in(config, run_dir / "config.yaml", told=True)
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


def _with_values_in(config: Config, file: Path, *, told: bool = False) -> Config:
    if not file.exists():
        return config
    try:
        earlier = from_yaml_file(file)
    except UserError as error:
        print(f"warning: {error}: options that are not given take their defaults", flush=True)
        return config
    now = with_values_of(config, earlier)
    now = without_idle(now, {option.path for option, _ in idle(config)})  # as --no-save leaves its --save-interval
    if told and (line := changed_options(earlier, now)):
        print(line, flush=True)
    return now


def _stored(url: str) -> bytes | None:
    """Return the config.yaml beside the checkpoints of a store; None if there is none, or no checkpoint."""
    try:
        store, _ = remote.place_of(url)
        return store.read("config.yaml", at_most=_LARGEST) if remote.complete_in(store) else None
    except StoreError:  # who copies the checkpoint says what is wrong
        return None
