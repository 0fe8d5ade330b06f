"""Give each context-parallel rank its part of the text, and of the images if the encoder is in the pipeline.

Images are dealt by FLOPs, and none is encoded twice. Just before features are merged, they go to the ranks that have
their image tokens, in an all-to-all whose gradient is the opposite one (`MicroBatchContext.of_this_part`). Nothing is
communicated to decide it: every rank knows the sizes of all images.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from megavlm.arch.dims import RowSplit
from megavlm.config.schema import ModelConfig
from megavlm.data.context_parts import in_memory_of, in_parts, part_of
from megavlm.data.image_assignment import ImageAssignment
from megavlm.inputs.batch import DealtImages, MicroBatch
from megavlm.pipeline.feature_exchange import Rows, feature_exchange_of


def own_part(batch: MicroBatch, split: RowSplit, *, rank: int, deals: ModelConfig | None) -> MicroBatch:
    """Return the micro-batch on the host as one of the context-parallel ranks computes it.

    `deals` is the model if its encoder is in the pipeline. The patches of a rank's images are selected once all of them
    are on the device (`DevicePrefetcher`).
    """
    part = part_of(batch, split, rank=rank)
    if part.context is None or deals is None:
        return part
    sizes, positions = batch.image_sizes, batch.text.feature_positions
    (owners,) = ImageAssignment(deals, split.ranks).encoders([sizes])
    mine, counts = owners == rank, sizes.image_tokens(deals.projector)
    parts, _ = in_parts(positions, split, length=batch.text.tokens.shape[1])
    exchange = feature_exchange_of(np.repeat(owners, counts), parts.numpy(), range(split.ranks))
    route = exchange.features(rank)

    def kept(rows: Rows) -> torch.Tensor:
        return in_memory_of(positions, torch.from_numpy(rows))

    images = DealtImages(
        patch_rows=kept(sizes.patch_rows(mine)),
        num_features=sum(count for count, own in zip(counts, mine, strict=True) if own),
        sent=kept(np.concatenate(route.send)),
        sent_sizes=tuple(map(len, route.send)),
        received=kept(np.concatenate(route.receive).argsort()),
        received_sizes=tuple(map(len, route.receive)),
    )
    return replace(part, image_sizes=sizes.select(mine), context=replace(part.context, images=images))
