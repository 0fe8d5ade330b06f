"""An objective of embeddings: a positive must be closer than the hardest negative of the global batch, by a margin.

`--extension margin_loss --objective margin` trains with it.
"""

from __future__ import annotations

from dataclasses import dataclass

from megavlm.extension import POSITIVE, Extension, ObjectiveEntry, option


@dataclass(frozen=True)
class MarginOptions:
    """Options of the loss: `--margin-width`, or in YAML `model.objective.losses.margin`."""

    width: float = option(0.2, "Cosine by which a positive must be closer than any negative.", valid=POSITIVE)


EXTENSION = Extension(objectives=(ObjectiveEntry("margin", "margin_loss.loss:margin", MarginOptions),))
