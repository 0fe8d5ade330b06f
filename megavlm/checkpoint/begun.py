"""Read what the run that is continued began with. No torch."""

from __future__ import annotations

from pathlib import Path

from megavlm.checkpoint import folders
from megavlm.config.load import from_yaml_file
from megavlm.config.schema import Config
from megavlm.config.start_defaults import with_values_of
from megavlm.errors import UserError


def as_begun(config: Config) -> Config:
    """Return the configuration with the values of the run that it continues for options that start anew else.

    Those of `start_defaults` that nobody set: another version's table, or a longer run, must not change the learning
    rate of a run that is under way.
    """
    places = [Path(config.run.run_dir)]
    if not folders.checkpoints(places[0] / "checkpoints") and config.checkpoint.load is not None:
        given = Path(config.checkpoint.load)
        places = [given, given.parent.parent]
    for place in places:
        if folders.checkpoints(place / "checkpoints") and (place / "config.yaml").exists():
            try:
                return with_values_of(config, from_yaml_file(place / "config.yaml"))
            except UserError as error:
                print(f"warning: {error}: options that are not given take their defaults", flush=True)
    return config
