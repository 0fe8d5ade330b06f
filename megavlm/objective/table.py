"""The losses of `arch/objectives.py` that are formed over a whole batch."""

from __future__ import annotations

from collections.abc import Mapping

from megavlm.arch.objectives import OBJECTIVES
from megavlm.config.registry import Entry, registered
from megavlm.objective.cached import WholeBatchLoss
from megavlm.objective.contrastive import info_nce
from megavlm.objective.sigmoid import sigmoid_loss

WHOLE_BATCH: Mapping[str, WholeBatchLoss] = {"contrastive": info_nce, "sigmoid": sigmoid_loss}

if WHOLE_BATCH.keys() != {name for name, objective in OBJECTIVES.items() if objective.embeds}:
    raise TypeError("each objective of embeddings needs a loss over the whole batch")


def whole_batch(kind: str) -> WholeBatchLoss:
    """Return the loss of an objective of embeddings: the package's own, or an extension's."""
    if kind in WHOLE_BATCH:
        return WHOLE_BATCH[kind]
    entry = registered("objectives")[kind]
    assert isinstance(entry, Entry), kind
    found: WholeBatchLoss = entry.load()
    return found
