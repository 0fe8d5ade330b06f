"""The kind of data that a run reads."""

from __future__ import annotations

from megavlm.config.schema import Config


def data_source(config: Config) -> str:
    """Return `--data`; its default is files if `--sources` is given, else synthetic."""
    return config.data.source or ("files" if config.data.sources else "synthetic")
