"""Split the rows of micro-batches into the parts of context-parallel ranks: index arithmetic, without communication.

Rank r of R has the positions r·S/R … (r+1)·S/R − 1 of each row. Labels were shifted before, so no part needs its
neighbour's tokens; only attention does (`model/context_attention.py`).

Legend: B rows, S positions per row, F image features.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from megavlm.data.batch import ContextPart, MicroBatch, TextBatch


def part_of(batch: MicroBatch, *, rank: int, ranks: int) -> MicroBatch:
    """Return the micro-batch on the host as one of `ranks` context-parallel ranks computes it.

    Images stay whole: their features are selected where they are merged with the text.
    """
    if ranks == 1:
        return batch
    text, length = batch.text, batch.text.tokens.shape[1]
    assert length % ranks == 0, "the configuration rules refuse this"
    rows, positions = local_positions(text.feature_positions, rank=rank, ranks=ranks, length=length)
    context = ContextPart(ranks, text.tokens, rows, text.feature_positions.numel())
    features = batch.features
    if features is not None:
        _, merged = local_positions(features.positions, rank=rank, ranks=ranks, length=length)
        features = replace(features, positions=merged)
    return replace(
        batch, text=_part_of_text(text, positions, rank=rank, ranks=ranks), features=features, context=context
    )


def _part_of_text(text: TextBatch, feature_positions: Tensor, *, rank: int, ranks: int) -> TextBatch:
    length = text.tokens.shape[1]
    own = slice(rank * length // ranks, (rank + 1) * length // ranks)
    trained = text.trained_positions
    if trained is not None:
        _, trained = local_positions(trained, rank=rank, ranks=ranks, length=length)
        if not len(trained):
            trained = torch.zeros(1, dtype=torch.int64)  # one whose loss the mask leaves out

    def cut(values: Tensor) -> Tensor:
        return _in_memory_of(values, values[..., own])

    return replace(
        text,
        tokens=cut(text.tokens),
        labels=cut(text.labels),
        loss_mask=cut(text.loss_mask),
        positions=cut(text.positions),
        feature_positions=feature_positions,
        trained_positions=trained,
        sources=None if text.sources is None else cut(text.sources),
    )


def local_positions(positions: Tensor, *, rank: int, ranks: int, length: int) -> tuple[Tensor, Tensor]:
    """Return which of the indices [F] into the flattened [B·S] lie in a rank's part, and the same in [B·S/ranks].

    `length` is S.
    """
    own = length // ranks
    chosen = torch.nonzero(part_index(positions, ranks=ranks, length=length) == rank)[:, 0]
    places = positions[chosen]
    found = places // length * own + places % own
    return _in_memory_of(positions, chosen), _in_memory_of(positions, found)


def part_index(positions: Tensor, *, ranks: int, length: int) -> Tensor:
    """Return [F], the rank in whose part of its row each index [F] into the flattened [B·S] lies; `length` is S."""
    return positions % length // (length // ranks)


def _in_memory_of(like: Tensor, values: Tensor) -> Tensor:
    """Return contiguous values, in pinned memory if `like` is, so that the host does not wait for copies to a GPU."""
    return values.pin_memory() if like.is_pinned() else values.contiguous()
