"""Images dealt to context-parallel ranks: each is encoded once, and each image token gets its feature, on paper."""

from __future__ import annotations

import pytest
import torch

from megavlm.arch.dims import RowSplit
from megavlm.inputs.batch import ImageSizes, MicroBatch, TextBatch
from megavlm.pipeline.micro_batches import own_part
from tests.support.flags import resolved
from tests.support.training import SMALL

MODEL = resolved(SMALL).model  # four patches make a feature
LENGTH = 24


@pytest.mark.parametrize("grids", [(), ((4, 4),), ((4, 6), (2, 2), (6, 4), (2, 4), (4, 4))])
@pytest.mark.parametrize("split", [RowSplit(2), RowSplit(4), RowSplit(2, 2), RowSplit(1, 3)], ids=str)
def test_each_image_is_encoded_once_and_its_features_reach_its_tokens(
    split: RowSplit, grids: tuple[tuple[int, int], ...]
) -> None:
    sizes = ImageSizes(grids)
    features = sum(sizes.image_tokens(MODEL.projector))
    numbers = torch.arange(2 * LENGTH).view(2, LENGTH)
    positions = torch.randperm(2 * LENGTH, generator=torch.Generator().manual_seed(1))[:features].sort().values
    text = TextBatch(numbers, numbers, numbers.float(), numbers, feature_positions=positions)
    whole = MicroBatch(text, sizes)
    parts = [own_part(whole, split, rank=rank, deals=MODEL) for rank in range(split.ranks)]
    dealt = [part.context.images for part in parts if part.context is not None and part.context.images is not None]
    assert len(dealt) == split.ranks

    patches = torch.cat([each.patch_rows for each in dealt])
    assert sorted(patches.tolist()) == list(range(sizes.num_patches))
    assert sum(part.image_sizes.num_images for part in parts) == len(grids)
    assert [each.num_features for each in dealt] == [
        sum(part.image_sizes.image_tokens(MODEL.projector)) for part in parts
    ]
    # What ranks have encoded, as numbers of features: those of their images, in order.
    patch_of_feature = torch.arange(sizes.num_patches).view(-1, 4)[:, 0]
    made = [patch_of_feature[torch.isin(patch_of_feature, each.patch_rows)] // 4 for each in dealt]
    sent = [mine[each.sent].split(each.sent_sizes) for mine, each in zip(made, dealt, strict=True)]
    for rank, (part, each) in enumerate(zip(parts, dealt, strict=True)):
        assert each.received_sizes == tuple(len(messages[rank]) for messages in sent)
        merged = torch.cat([messages[rank] for messages in sent])[each.received]
        assert torch.equal(positions[merged], part.text.labels.flatten()[part.text.feature_positions])


def test_a_colocated_encoder_keeps_its_images() -> None:
    numbers = torch.arange(8).view(1, 8)
    text = TextBatch(numbers, numbers, numbers.float(), numbers, feature_positions=torch.arange(4))
    part = own_part(MicroBatch(text, ImageSizes(((4, 4),))), RowSplit(2), rank=1, deals=None)
    assert part.context is not None
    assert part.context.images is None
    assert part.image_sizes.num_images == 1
