"""Which kind of data a run reads."""

from __future__ import annotations

from megavlm.config.schema import Config


def data_source(config: Config) -> str:
    """`--data`, or what it stands for where it is left out: files where there are sources, else synthetic."""
    return config.data.source or ("files" if config.data.sources else "synthetic")
