"""Split the rows of micro-batches into the parts of context-parallel ranks: index arithmetic, without communication.

`RowSplit` assigns positions to ranks. Labels are shifted before the split, so a part does not need its neighbour's
tokens. Two layers need data of other parts: attention (`model/context_attention.py`), and layers that predict further
tokens, which read the embeddings of later positions. The few such embeddings at the ends of parts are exchanged
(`followers`).

Legend: B rows, S positions per row, F image features.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from megavlm.arch.dims import RowSplit
from megavlm.inputs.batch import ContextPart, MicroBatch, TextBatch


@lru_cache(maxsize=16)
def order_of(split: RowSplit, length: int) -> Tensor:
    """Return the positions [S] of a row, grouped by rank: those of rank 0 in order, then those of rank 1, …"""
    runs = torch.arange(length).view(split.runs, -1)
    if split.groups > 1:
        runs = torch.stack([runs[: split.groups], runs[split.groups :].flip(0)], dim=1)
    return runs.flatten()


@lru_cache(maxsize=16)
def _places(split: RowSplit, length: int) -> Tensor:
    """Return the index [S] of each position in `order_of` (its inverse permutation)."""
    return order_of(split, length).argsort()


@dataclass(frozen=True, eq=False)
class Followers:
    """Gather indices with which each part of n positions reads the embeddings of later positions of its row."""

    rows: Tensor  # [parts, n] int64: among the part's own n rows, followed by the rows that all parts send
    sent: Tensor  # [parts, K] int64: the rows that a part sends to all others


@lru_cache(maxsize=16)
def followers(split: RowSplit, length: int, *, parts: int, steps: int) -> Followers:
    """Return the indices with which each part reads the embedding `steps` positions later in a row.

    A row's positions, in the order of `order_of`, are divided into `parts` (also by sequence parallelism). The row is
    cyclic: its first position follows its last. A part sends `steps` embeddings for each run of positions that begins
    in it. These are some kilobytes, whereas a whole row has as many bytes as the hidden states. Embeddings are sent
    rather than token ids, since a rank may lack the embedding's weight.
    """
    order, own = order_of(split, length), length // parts
    follower = _places(split, length)[(order + steps) % length]  # as places in `order`
    elsewhere = follower // own != torch.arange(length) // own
    needed = follower[elsewhere].unique()
    counts = torch.bincount(needed // own, minlength=parts)
    number = torch.arange(len(needed)) - (counts.cumsum(0) - counts)[needed // own]  # of each among its part's
    sent = torch.zeros(parts, int(counts.max()), dtype=torch.int64)
    sent[needed // own, number] = needed % own
    rows = follower % own
    arriving = torch.searchsorted(needed, follower[elsewhere])
    rows[elsewhere] = own + (needed // own * sent.shape[1] + number)[arriving]
    return Followers(rows.view(parts, own), sent)


def with_further_tokens(batch: MicroBatch, depths: int) -> MicroBatch:
    """Return a micro-batch of whole rows with labels, masks and positions added for layers that predict further tokens.

    At depth k (from 1; DeepSeek-V3, DeepSeek-AI 2024, section 2.2) position t reads token t + k and predicts token
    t + k + 1, the token that position t + k predicts in the main model. Position t has a loss if position t + k has
    one and is of the same sample.
    """
    text = batch.text
    if not depths:
        return batch
    (rows, length), like = text.tokens.shape, text.labels
    bounds = torch.arange(0, rows * length + 1, length) if text.cu_seqlens is None else text.cu_seqlens.long()
    sample = torch.arange(len(bounds) - 1).repeat_interleave(bounds.diff()).view(rows, length)
    labels, masks = [text.labels], [text.loss_mask]
    for depth in range(1, depths + 1):
        labels.append(text.labels.roll(-depth, -1))
        masks.append(text.loss_mask.roll(-depth, -1) * (sample.roll(-depth, -1) == sample))
        masks[-1][:, max(0, length - depth) :] = 0
    trained = text.trained_positions
    if trained is not None:
        further = torch.nonzero(torch.cat(masks[1:]).flatten())[:, 0] + rows * length
        trained = in_memory_of(like, torch.cat([trained, further]))
    turned = torch.stack([text.positions.roll(-depth, -1) for depth in range(1, depths + 1)])
    added = replace(
        text,
        labels=in_memory_of(like, torch.cat(labels)),
        loss_mask=in_memory_of(like, torch.cat(masks)),
        trained_positions=trained,
        further_positions=in_memory_of(like, turned),
    )
    return replace(batch, text=added)


def part_of(batch: MicroBatch, split: RowSplit, *, rank: int) -> MicroBatch:
    """Return the part of a micro-batch (on the host) of one context-parallel rank; images and sounds are unchanged."""
    if split.ranks == 1:
        return batch
    text, length = batch.text, batch.text.tokens.shape[1]
    positions = local_positions(text.feature_positions, split, rank=rank, length=length)
    context = ContextPart(text.tokens, batch.image_sizes)
    features = batch.features
    if features is not None:
        merged = local_positions(features.positions, split, rank=rank, length=length)
        features = replace(features, positions=merged)
    text = _part_of_text(text, positions, split, rank=rank)
    return replace(batch, text=text, features=features, context=context)


def _part_of_text(text: TextBatch, feature_positions: Tensor, split: RowSplit, *, rank: int) -> TextBatch:
    length = text.tokens.shape[1]
    own, trained = order_of(split, length).view(split.ranks, -1)[rank], text.trained_positions
    if trained is not None:
        trained = local_positions(trained, split, rank=rank, length=length)
        if not len(trained):
            trained = torch.zeros(1, dtype=torch.int64)  # a position whose loss mask is 0

    def cut(values: Tensor, axis: int = -1) -> Tensor:
        return in_memory_of(values, values.index_select(axis, own))

    return replace(
        text,
        tokens=cut(text.tokens),
        labels=cut(text.labels),
        loss_mask=cut(text.loss_mask),
        positions=cut(text.positions),
        feature_positions=feature_positions,
        trained_positions=trained,
        sources=None if text.sources is None else cut(text.sources),
        further_positions=None if text.further_positions is None else cut(text.further_positions),
        teacher_tokens=None if text.teacher_tokens is None else cut(text.teacher_tokens, 1),
        teacher_weights=None if text.teacher_weights is None else cut(text.teacher_weights, 1),
        **_part_of_pool(text, split, rank=rank, length=length),
    )


def _part_of_pool(text: TextBatch, split: RowSplit, *, rank: int, length: int) -> dict[str, Any]:
    """Return the pooled positions in a rank's part with their text numbers (`pool`), and their `pool_weights`."""
    if text.pool is None or text.pool_weights is None:
        return {}
    owner, found = in_parts(text.pool[0], split, length=length)
    mine = owner == rank
    pool = torch.stack([found[mine], text.pool[1][mine]])
    return {"pool": in_memory_of(text.pool, pool), "pool_weights": in_memory_of(text.pool, text.pool_weights[mine])}


def local_positions(positions: Tensor, split: RowSplit, *, rank: int, length: int) -> Tensor:
    """Select the indices [F] into the flattened [B·S] that lie in a rank's part, as indices into its [B·S/ranks].

    `length` is S.
    """
    owner, found = in_parts(positions, split, length=length)
    return in_memory_of(positions, found[owner == rank])


def in_parts(positions: Tensor, split: RowSplit, *, length: int) -> tuple[Tensor, Tensor]:
    """Return, for each index [F] into the flattened [B·S], its rank and its index into that rank's [B·S/ranks]."""
    own, places = length // split.ranks, _places(split, length)[positions % length]
    return places // own, positions // length * own + places % own


def in_memory_of(like: Tensor, values: Tensor) -> Tensor:
    """Return `values` contiguous, and pinned if `like` is pinned, so that copies to a GPU do not block the host."""
    return values.pin_memory() if like.is_pinned() else values.contiguous()
