"""Image tokens of grids and of tiled images, by hand; tests/parity compares them with Transformers."""

from __future__ import annotations

import pytest

from megavlm.arch.image_tokens import TileGroup, feature_map, grid_of, smallest_grid, tokens_per_grid, tokens_per_image
from megavlm.config.schema import ProjectorConfig
from megavlm.errors import UserError


def test_tokens_of_base_tiles_grids_and_newlines() -> None:
    groups = [TileGroup((2, 1), (20, 10)), TileGroup((0, 0), (20, 10))]
    tiled = ProjectorConfig(pixel_shuffle=2, anyres_max_tiles=9)
    assert tokens_per_image([(4, 4)] * 4, groups, tiled) == [4 + 4 * (2 + 1), 4 + 1]
    frames = [TileGroup((0, 0), (20, 10), "frame"), TileGroup((0, 0), (20, 10), "last frame")]
    assert tokens_per_image([(6, 6)] * 2, frames, tiled) == [2 * 2, 2 * 2 + 1]
    assert tokens_per_image([(4, 6)], [], ProjectorConfig(pixel_shuffle=2)) == [6]
    assert tokens_per_image([], [], tiled) == []
    with pytest.raises(AssertionError, match="every tile"):
        tokens_per_image([(4, 4)] * 3, groups, tiled)


def test_an_image_of_which_nothing_would_be_left_is_refused() -> None:
    with pytest.raises(UserError, match=r"8×127 pixels is too narrow for model.projector.anyres_max_tiles 1"):
        feature_map(TileGroup((1, 4), (8, 127)), 3, max_tiles=1)


def test_tokens_of_grids() -> None:
    assert grid_of(28, 42, 14) == (2, 3)
    merging = ProjectorConfig(pixel_shuffle=2)
    assert tokens_per_grid((4, 6), merging) == 6
    assert tokens_per_grid((3, 5), ProjectorConfig()) == 15
    assert tokens_per_grid(smallest_grid(merging), merging) == 1


@pytest.mark.parametrize(("height", "width"), [(30, 28), (28, 30), (0, 28)])
def test_sides_that_do_not_divide_name_the_option(height: int, width: int) -> None:
    with pytest.raises(UserError, match=rf"{height}×{width}.*model.vision.patch_size 14"):
        grid_of(height, width, 14)


def test_grids_that_do_not_merge_name_the_option() -> None:
    with pytest.raises(UserError, match=r"3×4 .*model.projector.pixel_shuffle 2"):
        tokens_per_grid((3, 4), ProjectorConfig(pixel_shuffle=2))
