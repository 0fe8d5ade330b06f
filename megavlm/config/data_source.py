"""The kind of data that a run reads."""

from __future__ import annotations

from megavlm.config.schema import Config


def data_source(config: Config) -> str:
    """Return `--data`; its default is files if `--datasets` is given, else synthetic."""
    return config.data.kind or ("files" if config.data.datasets else "synthetic")
