"""Torch-free descriptions of a model's layers: sizes, FLOPs and communication. The import registers the connectors."""

import megavlm.arch.connectors  # noqa: F401
