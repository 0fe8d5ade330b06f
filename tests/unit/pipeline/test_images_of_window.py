from dataclasses import replace

import numpy as np
import pytest
import torch

from megavlm.arch.anyres import TileGroup
from megavlm.config.schema import LanguageConfig, ModelConfig, ProjectorConfig, VisionConfig
from megavlm.data.batch import MicroBatch
from megavlm.pipeline.images import (
    assign_images,
    encoder_flops,
    encoder_inputs,
    held_inputs,
    patches_by_rank,
    split_into_passes,
)

MODEL = ModelConfig(
    vision=VisionConfig(patch_size=4),
    projector=ProjectorConfig(pixel_shuffle=2),
    language=LanguageConfig(vocab_size=256),
)


def batch(grids, tile_groups=()):
    none = torch.empty(0, dtype=torch.long)
    return MicroBatch(none, none, none, none, grids, none, None, tile_groups=tile_groups)


def test_images_are_listed_in_the_order_of_their_tokens():
    found = encoder_inputs([batch(((4, 4), (2, 6))), batch(()), batch(((2, 2),))], MODEL)
    assert [(image.batch, image.patches, image.features) for image in found] == [
        (0, slice(0, 16), 4),
        (0, slice(16, 28), 3),
        (2, slice(0, 4), 1),
    ]


def test_tiles_of_an_image_stay_together():
    model = replace(MODEL, projector=ProjectorConfig(pixel_shuffle=2, anyres_max_tiles=4))
    groups = (TileGroup((1, 2), (16, 32)), TileGroup((0, 0), (16, 16)))
    found = encoder_inputs([batch(((4, 4),) * 4, groups)], model)
    assert [(image.patches, len(image.grids), image.tile_groups) for image in found] == [
        (slice(0, 48), 3, groups[:1]),
        (slice(48, 64), 1, groups[1:]),
    ]
    assert [image.features for image in found] == [4 + 2 * 5, 5]


def test_passes_hold_at_most_so_many_patches_and_every_image_once():
    found = encoder_inputs([batch(((4, 4), (2, 2), (2, 2), (8, 8), (4, 4)))], MODEL)
    passes = split_into_passes(found, 24)
    assert [[image.num_patches for image in one] for one in passes] == [[16, 4, 4], [64], [16]]
    assert split_into_passes([], 24) == []


def test_cost_grows_faster_than_patches():
    """Attention's square term: one image of 4 × the patches costs more than four images."""
    assert encoder_flops(((32, 32),), MODEL) > 4.5 * encoder_flops(((16, 16),), MODEL)


@pytest.mark.parametrize("width", [1, 2])
def test_each_rank_finds_its_images_in_the_patches_sent_to_it(width):
    """Numbered patches: what a rank reads from its own is what it would read from all of them."""
    grids = ((4, 4), (2, 6)), (), ((2, 2), (4, 4), (2, 2))
    counts = [sum(rows * columns for rows, columns in each) for each in grids]
    numbers = torch.arange(sum(counts))[:, None].split(counts)
    whole = [replace(batch(each), patches=part) for each, part in zip(grids, numbers, strict=True)]
    images, owners = assign_images(whole, MODEL, encoders=4 // width)
    rows = patches_by_rank(whole, MODEL, ranks=4, width=width)
    for rank, places in enumerate(rows):
        ends = np.searchsorted(places, np.cumsum(counts))
        parts = torch.cat(numbers)[places].tensor_split(ends[:-1].tolist())
        sent = [replace(each, patches=part) for each, part in zip(whole, parts, strict=True)]
        mine = [image for image, owner in zip(images, owners, strict=True) if owner == rank // width]
        assert mine, "every encoder has work here"
        assert held_inputs(mine, whole) == mine
        for here, there in zip(held_inputs(mine, sent), mine, strict=True):
            assert sent[here.batch].patches[here.patches].equal(whole[there.batch].patches[there.patches])
    assert sorted(np.concatenate(rows)) == sorted(list(range(sum(counts))) * width)
