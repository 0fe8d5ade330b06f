"""Windows of a patch grid: a permutation that keeps each window together, in few runs of equal length."""

from __future__ import annotations

from itertools import groupby, pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from megavlm.arch.workload import window_squares
from megavlm.model.vision import VisionLayout
from megavlm.model.vision_ops import window_order

SIDES = st.integers(1, 9)


@given(SIDES, SIDES, st.integers(1, 5))
def test_each_window_is_one_tile(rows: int, columns: int, side: int) -> None:
    order, lengths = window_order((rows, columns), side)
    assert sorted(order.tolist()) == list(range(rows * columns))
    tiles = [
        {(patch // columns // side, patch % columns // side) for patch in span.tolist()}
        for span in order.split(lengths)
    ]
    assert all(len(tile) == 1 for tile in tiles)
    assert len(set.union(*tiles)) == len(tiles) == -(-rows // side) * -(-columns // side)
    assert len(list(groupby(lengths))) <= 4
    assert sum(length**2 for length in lengths) == window_squares((rows, columns), side)


@given(st.lists(st.tuples(SIDES, SIDES), max_size=3), st.sampled_from([0, 2, 4]), st.sampled_from([1, 4]))
def test_patches_leave_the_tower_as_they_came(grids: list[tuple[int, int]], window: int, multiple: int) -> None:
    layout = VisionLayout.of(tuple(grids), class_token=False, multiple=multiple, blank=(2, 2), window=window)
    device = torch.device("cpu")
    row_major = torch.cat([torch.cartesian_prod(torch.arange(r), torch.arange(c)) for r, c in layout.grids])
    inside = layout.in_tower_order(row_major)
    assert torch.equal(layout.coordinates(device)[: len(inside)], inside)
    assert torch.equal(inside[layout.patch_index(device)], row_major)
    if window:
        assert layout.window_bounds[-1] == layout.bounds[-1]
        bounds, starts = layout.window_bounds, layout.bounds
        lengths = [end - start for start, end in pairwise(bounds[: -1 if layout.padding else None])]
        assert len(list(groupby(lengths))) == len(set(lengths))  # equal ones are together, over all images
        image = torch.repeat_interleave(torch.arange(len(layout.lengths)), torch.tensor(layout.lengths))
        in_tower = layout.in_tower_order(image)
        assert all(len(set(in_tower[a:b].tolist())) == 1 for a, b in pairwise(bounds) if b <= len(image))
        order = layout.image_order(device)
        if order is not None:
            tokens = torch.cat([in_tower, torch.full((layout.padding,), -1)])
            assert torch.equal(tokens[order[0]][: len(image)], image)
            assert torch.equal(tokens[order[0]][order[1]], tokens)
        assert (order is None) == (len(layout.grids) == 1)
        assert starts[-1] == len(image) + layout.padding
