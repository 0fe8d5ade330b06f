"""Give a rank's chunks their part of a step's micro-batches, copied to the device one micro-batch ahead of use.

Each context-parallel rank gets its part of the text, and of the images and sounds if the encoder is in the pipeline.
Images are dealt by FLOPs, sounds by length, and none is encoded twice. Just before features are merged, an all-to-all
sends them to the ranks that have their tokens; its backward pass is the opposite all-to-all
(`MicroBatchContext.exchanged`). The assignment needs no communication: every rank knows all sizes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megavlm.arch.dims import RowSplit
from megavlm.backend.host_copies import HostCopies
from megavlm.config.schema import ModelConfig
from megavlm.data.context_parts import in_memory_of, in_parts, local_positions, order_of, part_of
from megavlm.data.costs import ImageAssignment, assign_longest_first
from megavlm.inputs.batch import DealtImages, ImageBatch, MicroBatch, SoundBatch
from megavlm.pipeline.colocated import Rows, feature_exchange_of


def on_device(
    batches: Sequence[MicroBatch],
    host_copies: HostCopies,
    *,
    chunks: int,
    meanwhile: Callable[[], object] = lambda: None,
) -> list[Iterator[MicroBatch]]:
    """Return one iterator per chunk of this rank; each yields the same micro-batches, in order, on the device.

    While one micro-batch is used, the next one is copied. When all chunks have taken a micro-batch, it is freed, except
    for tensors that autograd keeps for a backward pass.

    Args:
        batches: on the host, except for features of a colocated encoder.
        meanwhile: called before a chunk takes a micro-batch.
    """
    moving = _moved(batches, host_copies)
    waiting = [deque[MicroBatch]() for _ in range(chunks)]  # micro-batches that only other chunks have taken

    def taken(own: deque[MicroBatch]) -> Iterator[MicroBatch]:
        for _ in batches:
            meanwhile()
            if not own:
                batch = next(moving)
                for each in waiting:
                    each.append(batch)
                del batch
            yield own.popleft()

    return [taken(own) for own in waiting]


def _moved(batches: Sequence[MicroBatch], host_copies: HostCopies) -> Iterator[MicroBatch]:
    """Yield micro-batches on the device, each after the copy of the next has begun; keep no reference to them."""
    copying = deque[tuple[MicroBatch, Any]]()
    ready: list[MicroBatch] = []
    for index in range(len(batches) + 1):
        if copying:
            batch, ticket = copying.popleft()
            host_copies.wait(ticket)
            ready.append(_with_patches(batch))
            del batch
        if index < len(batches):
            names, values = zip(*batches[index].host_tensors().items(), strict=True)
            copies, ticket = host_copies.to_device(values)
            copying.append((batches[index].with_tensors(dict(zip(names, copies, strict=True))), ticket))
            del copies
        if ready:
            yield ready.pop()


def _with_patches(batch: MicroBatch) -> MicroBatch:
    """Return a micro-batch on the device with its patches. The first rank of `vision_group` broadcasts the patches, and
    context-parallel ranks keep those of their own images.

    All ranks of the group must call this function for the same micro-batches, in the same order.
    """
    images, context = batch.images, batch.context
    if images is None:
        return batch
    patches = images.patches
    if patches.is_meta:
        patches = torch.empty(patches.shape, dtype=patches.dtype, device=batch.text.tokens.device)
    if images.vision_group is not None and patches.numel():
        dist.broadcast(patches, group=images.vision_group, group_src=0)
    if context is not None and context.images is not None:
        patches = patches.index_select(0, context.images.patch_rows)
    return replace(batch, images=ImageBatch(batch.image_sizes, patches))


def own_part(batch: MicroBatch, split: RowSplit, *, rank: int, deals: ModelConfig | None) -> MicroBatch:
    """Return the part of a micro-batch, on the host, that context-parallel rank `rank` computes.

    `deals` is the model if its encoder is in the pipeline. The patches of a rank's images are selected once all of them
    are on the device (`on_device`).
    """
    part = part_of(batch, split, rank=rank)
    if part.context is None or deals is None:
        return part
    length = batch.text.tokens.shape[1]

    def dealt(owners: Rows, counts: Sequence[int], rows: Rows, positions: Tensor) -> DealtImages:
        parts, _ = in_parts(positions, split, length=length)
        route = feature_exchange_of(np.repeat(owners, counts), parts.numpy(), range(split.ranks)).features(rank)

        def kept(rows: Rows) -> Tensor:
            return in_memory_of(positions, torch.from_numpy(rows))

        return DealtImages(
            patch_rows=kept(rows),
            num_features=int(np.array(counts, dtype=np.int64)[owners == rank].sum()),
            sent=kept(np.concatenate(route.send)),
            sent_sizes=tuple(map(len, route.send)),
            received=kept(np.concatenate(route.receive).argsort()),
            received_sizes=tuple(map(len, route.receive)),
        )

    sizes, sounds = batch.image_sizes, batch.sounds
    (owners,) = ImageAssignment(deals, split.ranks).encoders([sizes])
    mine, counts = owners == rank, sizes.image_tokens(deals.projector)
    images = dealt(owners, counts, sizes.patch_rows(mine), batch.text.feature_positions)
    if sounds is not None:
        owners = np.array(assign_longest_first(sounds.frames, split.ranks), dtype=np.int64)
        rows = np.flatnonzero(np.repeat(owners == rank, sounds.frames))
        route = dealt(owners, sounds.feature_counts(deals), rows, sounds.positions)
        frames = tuple(length for length, owner in zip(sounds.frames, owners, strict=True) if owner == rank)
        mels = sounds.mels if sounds.mels.is_meta else in_memory_of(sounds.mels, sounds.mels[route.patch_rows])
        positions = local_positions(sounds.positions, split, rank=rank, length=length)
        sounds = SoundBatch(frames, mels, positions, route.received, route)
    return replace(part, image_sizes=sizes.select(mine), sounds=sounds, context=replace(part.context, images=images))


def whole_rows(own: Tensor, split: RowSplit, group: dist.ProcessGroup) -> Tensor:
    """Return rows [B, S, …] from the parts [B, S/ranks, …] of all context-parallel ranks (all-gather)."""
    if split.ranks == 1:
        return own
    parts = [torch.empty_like(own) for _ in range(split.ranks)]
    dist.all_gather(parts, own.contiguous(), group=group)
    joined = torch.cat(parts, dim=1)
    return joined[:, order_of(split, joined.shape[1]).argsort().to(own.device)]
