"""Image tokens of tiled images: by hand what tests/parity holds against Transformers."""

from __future__ import annotations

import pytest

from megavlm.config.cli import parse
from megavlm.data.anyres import TileGroup, feature_map, features_of_images
from megavlm.data.collate import CollateSpec, collate
from megavlm.data.rank_loader import stats
from megavlm.data.synthetic import SyntheticSource
from megavlm.errors import UserError


def test_padding_is_cut_off_on_both_sides() -> None:
    wide = feature_map(TileGroup(grid=(2, 2), size=(10, 20)), 4, max_tiles=9)
    assert (wide.rows, wide.columns) == (slice(2, 6), slice(0, 8))
    tall = feature_map(TileGroup(grid=(2, 2), size=(20, 10)), 4, max_tiles=9)
    assert (tall.rows, tall.columns) == (slice(0, 8), slice(2, 6))
    assert (tall.height, tall.width) == (8, 4)


def test_a_map_is_reduced_where_it_is_more_than_a_tenth_too_long() -> None:
    grid = TileGroup(grid=(2, 2), size=(10, 10))
    assert feature_map(grid, 4, max_tiles=4).width == 8
    reduced = feature_map(grid, 4, max_tiles=1)  # from 8 × 8 to one tile's worth
    assert (reduced.rows, reduced.height, reduced.width) == (slice(0, 8), 4, 4)


def test_tokens_of_base_tiles_grids_and_newlines() -> None:
    groups = [TileGroup((2, 1), (20, 10)), TileGroup((0, 0), (20, 10))]
    assert features_of_images([(4, 4)] * 4, groups, pixel_shuffle=2, max_tiles=9) == [4 + 4 * (2 + 1), 4 + 1]
    assert features_of_images([(4, 6)], [], pixel_shuffle=2, max_tiles=None) == [6]
    with pytest.raises(AssertionError, match="every tile"):
        features_of_images([(4, 4)] * 3, groups, pixel_shuffle=2, max_tiles=9)


def test_an_image_of_which_nothing_would_be_left_is_refused() -> None:
    with pytest.raises(UserError, match=r"8×127 pixels is too narrow for --projector-anyres-max-tiles 1"):
        feature_map(TileGroup((1, 4), (8, 127)), 3, max_tiles=1)


def test_synthetic_images_are_tiled_where_they_are_alone() -> None:
    flags = "--vision-image-size 8 --vision-patch-size 4 --image-sizes 16 --images-per-sample 1 2 0 --seq-length 40"
    config = parse([*flags.split(), "--projector-anyres-max-tiles", "4"])
    source = SyntheticSource(config)
    batch = collate(
        [[sample] for sample in [source.sample(index) for index in range(3)]],
        CollateSpec.of(config, source, seq_length=40),
    )
    assert batch.tile_groups == (
        TileGroup((2, 2), (16, 16)),
        TileGroup((0, 0), (16, 16)),
        TileGroup((0, 0), (16, 16)),
    )
    assert (batch.tokens == source.image_token).sum(1).tolist() == [4 + 4 * 5, 2 * (4 + 1), 0]
    assert batch.grids == ((2, 2),) * 7
    assert batch.patches is not None
    assert batch.patches.shape[0] == batch.num_patches == 28
    assert stats([batch]).images == 3
