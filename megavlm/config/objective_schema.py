"""Options of what a run minimises: next-token prediction, or a loss of embeddings over the global batch.

Part of the schema (`schema.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from megavlm.config.option import AT_LEAST_1, KEY_ONLY, POSITIVE, Needs, option
from megavlm.config.registry import ObjectiveSections

EMBEDDINGS = Needs(
    lambda config: config.model.objective.kind != "next-token", "without embeddings", "add --objective contrastive"
)


@dataclass(frozen=True)
class ObjectiveConfig:
    """What the last layer computes from hidden states, and the loss that is formed of it."""

    kind: Literal["next-token", "contrastive", "sigmoid"] = option(
        "next-token",
        "Loss: next-token, or of query and document embeddings contrastive (InfoNCE) or sigmoid (SigLIP).",
        flag="--objective",
        point="objectives",
    )
    pooling: Literal["last", "mean"] = option(
        "last",
        "Embedding of a text: the state of its last token, or the mean over its tokens.",
        flag="--pooling",
        needs=EMBEDDINGS,
    )
    temperature: float = option(
        None,
        "Embeddings: cosines are divided by this; if learned, at first. Default: 0.05, sigmoid: 0.1.",
        valid=POSITIVE,
        needs=EMBEDDINGS,
    )
    learn_temperature: bool = option(
        None, "Train the temperature; default: with --objective sigmoid.", flag=KEY_ONLY, needs=EMBEDDINGS
    )
    sigmoid_bias: float = option(
        -10.0,
        "Objective sigmoid: learned number that is added to each score, at first.",
        flag=KEY_ONLY,
        needs=(
            EMBEDDINGS,
            Needs(
                lambda config: config.model.objective.kind == "sigmoid",
                "with another objective",
                "use --objective sigmoid",
            ),
        ),
    )
    symmetric: bool = option(
        True,
        "Objective contrastive: also find the query of a document among all queries; off: documents alone.",
        flag=KEY_ONLY,
        needs=(
            EMBEDDINGS,
            Needs(
                lambda config: config.model.objective.kind == "contrastive",
                "with another objective",
                "use --objective contrastive",
            ),
        ),
    )
    matryoshka_widths: tuple[int, ...] = option(
        (),
        "Embeddings: also apply the loss to so many first channels (Matryoshka), all with weight 1; default: to all "
        "channels alone.",
        flag=KEY_ONLY,
        valid=AT_LEAST_1,
        needs=EMBEDDINGS,
    )
    query_prefix: str = option("", "Embeddings: text, such as an instruction, put before each query.", needs=EMBEDDINGS)
    document_prefix: str = option("", "Embeddings: text before each document.", needs=EMBEDDINGS)
    losses: ObjectiveSections = field(default_factory=ObjectiveSections)
