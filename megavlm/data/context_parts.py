"""Split the rows of micro-batches into the parts of context-parallel ranks: index arithmetic, without communication.

`RowSplit` says which positions a rank has. Labels were shifted before, so no part needs its neighbour's tokens; only
attention does (`model/context_attention.py`).

Legend: B rows, S positions per row, F image features.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from megavlm.arch.dims import RowSplit
from megavlm.inputs.batch import ContextPart, MicroBatch, TextBatch


@lru_cache(maxsize=16)
def order_of(split: RowSplit, length: int) -> Tensor:
    """Return [S], the positions of a row as ranks have them: those of rank 0 in order, then those of rank 1, …"""
    runs = torch.arange(length).view(split.runs, -1)
    if split.groups > 1:
        runs = torch.stack([runs[: split.groups], runs[split.groups :].flip(0)], dim=1)
    return runs.flatten()


@lru_cache(maxsize=16)
def _places(split: RowSplit, length: int) -> Tensor:
    """Return [S], the place of each position in `order_of`."""
    return order_of(split, length).argsort()


def part_of(batch: MicroBatch, split: RowSplit, *, rank: int) -> MicroBatch:
    """Return the micro-batch on the host as one of the context-parallel ranks computes it; images stay as they are."""
    if split.ranks == 1:
        return batch
    text, length = batch.text, batch.text.tokens.shape[1]
    positions = local_positions(text.feature_positions, split, rank=rank, length=length)
    context = ContextPart(text.tokens, batch.image_sizes)
    features = batch.features
    if features is not None:
        merged = local_positions(features.positions, split, rank=rank, length=length)
        features = replace(features, positions=merged)
    return replace(batch, text=_part_of_text(text, positions, split, rank=rank), features=features, context=context)


def _part_of_text(text: TextBatch, feature_positions: Tensor, split: RowSplit, *, rank: int) -> TextBatch:
    length = text.tokens.shape[1]
    own, trained = order_of(split, length).view(split.ranks, -1)[rank], text.trained_positions
    if trained is not None:
        trained = local_positions(trained, split, rank=rank, length=length)
        if not len(trained):
            trained = torch.zeros(1, dtype=torch.int64)  # one whose loss the mask leaves out

    def cut(values: Tensor) -> Tensor:
        return in_memory_of(values, values.index_select(-1, own))

    return replace(
        text,
        tokens=cut(text.tokens),
        labels=cut(text.labels),
        loss_mask=cut(text.loss_mask),
        positions=cut(text.positions),
        feature_positions=feature_positions,
        trained_positions=trained,
        sources=None if text.sources is None else cut(text.sources),
        **_part_of_pool(text, split, rank=rank, length=length),
    )


def _part_of_pool(text: TextBatch, split: RowSplit, *, rank: int, length: int) -> dict[str, Any]:
    """Return the pooled positions that lie in a rank's part, with the texts that they are of and their weights."""
    if text.pool is None or text.pool_weights is None:
        return {}
    owner, found = in_parts(text.pool[0], split, length=length)
    mine = owner == rank
    pool = torch.stack([found[mine], text.pool[1][mine]])
    return {"pool": in_memory_of(text.pool, pool), "pool_weights": in_memory_of(text.pool, text.pool_weights[mine])}


def local_positions(positions: Tensor, split: RowSplit, *, rank: int, length: int) -> Tensor:
    """Return those of the indices [F] into the flattened [B·S] that lie in a rank's part, as indices into [B·S/ranks].

    `length` is S.
    """
    owner, found = in_parts(positions, split, length=length)
    return in_memory_of(positions, found[owner == rank])


def in_parts(positions: Tensor, split: RowSplit, *, length: int) -> tuple[Tensor, Tensor]:
    """Return of each index [F] into the flattened [B·S] the rank that has it, and its index there into [B·S/ranks]."""
    own, places = length // split.ranks, _places(split, length)[positions % length]
    return places // own, positions // length * own + places % own


def in_memory_of(like: Tensor, values: Tensor) -> Tensor:
    """Return contiguous values, in pinned memory if `like` is, so that the host does not wait for copies to a GPU."""
    return values.pin_memory() if like.is_pinned() else values.contiguous()
