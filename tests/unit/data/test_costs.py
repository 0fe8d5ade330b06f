"""What samples and images cost, which rank encodes which image, and the pixels that each rank has for it."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch

from megavlm.arch.image_tokens import TileGroup
from megavlm.arch.kinds import layer_cost
from megavlm.arch.layers import layer_names, part_of
from megavlm.arch.workload import Workload, window_squares
from megavlm.config.schema import (
    AudioConfig,
    Config,
    DataConfig,
    LanguageConfig,
    ModelConfig,
    ProjectorConfig,
    VisionConfig,
)
from megavlm.data.collate import CollateSpec
from megavlm.data.collator import ComputedCollator, all_images
from megavlm.data.costs import CostModel, ImageAssignment, assign_longest_first
from megavlm.data.synthetic import SyntheticSource
from megavlm.data.types import Segment
from megavlm.inputs.batch import ImageBatch, ImageSizes, SoundBatch
from megavlm.inputs.patches import Image
from megavlm.pipeline.encoder import split_into_passes
from megavlm.rules.defaults import resolve, resolve_model

MODEL = resolve_model(
    ModelConfig(
        vision=VisionConfig(patch_size=4, image_size=16),
        projector=ProjectorConfig(pixel_shuffle=2),
        language=LanguageConfig(vocab_size=256),
    )
)
TILED = replace(MODEL, projector=replace(MODEL.projector, anyres_max_tiles=4))
NONE = torch.empty(0, dtype=torch.int64)
GROUPS = (TileGroup((1, 2), (16, 32)), TileGroup((0, 0), (16, 16)))


def images_of(*grids: tuple[int, int]) -> ImageBatch:
    """Images whose patches are numbered."""
    sizes = ImageSizes(grids)
    return ImageBatch(sizes, torch.arange(sizes.num_patches)[:, None])


def test_tiles_of_an_image_stay_together() -> None:
    tiled = ImageSizes(((4, 4),) * 4, GROUPS)
    assert tiled.split() == [ImageSizes(((4, 4),) * 3, GROUPS[:1]), ImageSizes(((4, 4),), GROUPS[1:])]
    assert tiled.num_images == 2
    assert tiled.select(np.array([False, True])) == ImageSizes(((4, 4),), GROUPS[1:])
    assert tiled.patch_rows(np.array([False, True])).tolist() == list(range(48, 64))


def test_selected_images_have_their_own_patches() -> None:
    images = images_of((1, 2), (2, 2), (1, 1))
    assert [one.patches.flatten().tolist() for one in images.split()] == [[0, 1], [2, 3, 4, 5], [6]]
    chosen = images.select(np.array([True, False, True]))
    assert chosen.sizes.grids == ((1, 2), (1, 1))
    assert chosen.patches.flatten().tolist() == [0, 1, 6]
    assert images.select(np.array([False] * 3)).patches.shape == (0, 1)


def test_passes_hold_at_most_so_many_patches_and_every_image_once() -> None:
    passes = split_into_passes(images_of((4, 4), (2, 2), (2, 2), (8, 8), (4, 4)).split(), 24)
    assert [[len(image.patches) for image in one] for one in passes] == [[16, 4, 4], [64], [16]]
    sound = SoundBatch((20,), torch.zeros(20, 1), NONE, NONE)
    passes = split_into_passes([*images_of((2, 2)).split(), *[sound] * 2], 24)
    assert [[type(each) for each in one] for one in passes] == [[ImageBatch], [SoundBatch], [SoundBatch]]
    assert split_into_passes([], 24) == []


def test_sounds_are_encoded_where_images_leave_room() -> None:
    sizes, assignment = [ImageSizes(((8, 8),)), ImageSizes()], ImageAssignment(WINDOWED, 2)
    images, sounds = assignment.encoders(sizes), assignment.encoders(sizes, [(8,), (8, 900)])[2:]
    assert [each.tolist() for each in (*images, *sounds)] == [[0], [], [0], [0, 1]]


@pytest.mark.parametrize("width", [1, 2])
@pytest.mark.parametrize("model", [MODEL, TILED], ids=["plain", "tiled"])
def test_each_rank_renders_its_images_and_no_other(model: ModelConfig, width: int, monkeypatch) -> None:
    """Over the ranks of a replica, every image is rendered `width` times, and what each has is cut from the whole."""
    ranks, rendered = 4, []
    patches = Image.patches
    monkeypatch.setattr(Image, "patches", lambda image: rendered.append(image) or patches(image))
    data = DataConfig(images_per_sample=(1, 3, 0), image_sizes=(16, 32))
    source = SyntheticSource(config := Config(model=model, data=data))
    spec = CollateSpec.of(resolve(config), source)
    step = [[(Segment(2 * batch),), (Segment(2 * batch + 1),)] for batch in range(3)]
    whole = [made.batch for made in ComputedCollator(source, spec, own_images=all_images).collate(step)]
    number = len(rendered)
    rendered.clear()
    assignment = ImageAssignment(model, ranks, width)
    for rank in range(ranks):
        collator = ComputedCollator(source, spec, own_images=lambda sizes, rank=rank: assignment.own(sizes, rank=rank))
        chosen = assignment.own([batch.image_sizes for batch in whole], rank=rank)
        assert any(mask.any() for mask in chosen), "every rank encodes an image here"
        for made, batch, mask in zip(collator.collate(step), whole, chosen, strict=True):
            mine, expected = made.batch.images, batch.images.select(mask)
            assert mine.sizes == expected.sizes
            assert mine.patches.equal(expected.patches)
            assert made.batch.image_sizes == batch.image_sizes
            assert made.batch.text.tokens.equal(batch.text.tokens)
    assert len(rendered) == width * number


def largest_load(costs, owners, ranks):
    return max(sum(cost for cost, owner in zip(costs, owners, strict=True) if owner == rank) for rank in range(ranks))


@pytest.mark.parametrize("costs", [(5, 5, 4, 4, 3, 3, 3), (9, 8, 2, 2, 1, 1), (1, 1, 1, 10)])
@pytest.mark.parametrize("ranks", [2, 3])
def test_the_largest_load_is_within_grahams_bound(costs, ranks):
    best = min(largest_load(costs, owners, ranks) for owners in product(range(ranks), repeat=len(costs)))
    found = largest_load(costs, assign_longest_first(costs, ranks), ranks)
    assert found <= (4 / 3 - 1 / (3 * ranks)) * best + 1e-9


WINDOWED = resolve_model(
    ModelConfig(
        audio=AudioConfig(num_layers=2),
        audio_token=9,
        vision=VisionConfig(patch_size=4, window_size=16, full_attention_layers=(1,)),
        projector=ProjectorConfig(pixel_shuffle=2),
        language=LanguageConfig(vocab_size=100, window_size=20, full_attention_layers=(1,)),
    )
)


def test_costs_are_the_flops_of_the_model() -> None:
    grids = [(4, 6), (8, 8)]
    measured = CostModel.of(WINDOWED).cost(length=70, grids=grids, images=2, sounds=[350])
    work = Workload(
        patches=88,
        patch_squares=24**2 + 64**2,
        window_squares=sum(window_squares(grid, 4) for grid in grids),
        features=22,
        tokens=70,
        token_squares=4900,
        sliding_squares=70**2 - 50**2,
        trained_tokens=70,
        frames=100 + 75,  # a chunk of 200 mel frames, and the rest
        frame_squares=100**2 + 75**2,
        sounds=87,
    )
    costs = {name: layer_cost(name, WINDOWED, work).forward_flops for name in layer_names(WINDOWED)}
    language = sum(cost for name, cost in costs.items() if part_of(name) == "language")
    assert measured.patches == 88
    assert measured.language == pytest.approx(language)
    assert measured.vision == pytest.approx(sum(costs.values()) - language)
