"""Layers of a model without torch: what each computes and holds. Importing the package registers the connectors."""

import megavlm.arch.connectors  # noqa: F401
