"""Positions of slices on a canvas, against those that Transformers computes."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers.models.minicpmv4_7.modeling_minicpmv4_7 import MiniCPMV4_7Model

from megavlm.arch.image_tokens import Grid
from megavlm.data.collate import canvas_positions

SLICE, END_OF_SLICE, IMAGE, END_OF_IMAGE, BREAK, FEATURE = range(90, 96)
MARKS = {
    "slice_start_id": SLICE,
    "slice_end_id": END_OF_SLICE,
    "image_start_id": IMAGE,
    "image_end_id": END_OF_IMAGE,
    "newline_id": BREAK,
}
Picture = tuple[Grid, Grid, Grid, int]  # the copy, the arrangement, a slice, how many slices are missing


def written(picture: Picture) -> tuple[list[int], list[Grid]]:
    """The tokens of an image, and its grids in patches."""
    copy, (rows, columns), part, missing = picture
    tokens, grids = [IMAGE, *[FEATURE] * (copy[0] * copy[1]), END_OF_IMAGE], [copy]
    for number in range(rows * columns - missing):
        tokens += [BREAK] * (number > 0 == number % columns)
        tokens += [SLICE, *[FEATURE] * (part[0] * part[1]), END_OF_SLICE]
        grids.append(part)
    return tokens, [(4 * height, 4 * width) for height, width in grids]


@pytest.mark.parametrize(
    "pictures",
    [
        pytest.param([[((2, 3), (0, 0), (0, 0), 0)], [((1, 1), (0, 0), (0, 0), 0)]], id="whole"),
        # Nine columns of three features, and five rows: halves are rounded.
        pytest.param([[((4, 6), (2, 3), (3, 2), 0)], [((3, 4), (1, 2), (2, 5), 0)]], id="sliced"),
        pytest.param(
            [[((2, 2), (3, 1), (2, 3), 0), ((2, 1), (0, 0), (0, 0), 0), ((3, 3), (2, 2), (1, 2), 0)]], id="adjacent"
        ),
        pytest.param([[((2, 2), (2, 3), (2, 2), 1)]], id="a slice is missing"),
    ],
)
@pytest.mark.parametrize("text", [1, 4])
def test_positions_are_those_of_transformers(pictures: list[list[Picture]], text: int) -> None:
    tokens, grids = [7], list[Grid]()
    for neighbours in pictures:
        for picture in neighbours:
            more, sizes = written(picture)
            tokens += more
            grids += sizes
        tokens += range(10, 10 + text)
    ids, kinds = torch.tensor([tokens]), torch.tensor([tokens]).eq(FEATURE).int()
    theirs = SimpleNamespace(
        config=SimpleNamespace(**MARKS, downsample_mode="16x"),
        _group_visual_frames=lambda *given: MiniCPMV4_7Model._group_visual_frames(theirs, *given),
        _frame_end_idx=MiniCPMV4_7Model._frame_end_idx,
        get_vision_position_ids=lambda **given: MiniCPMV4_7Model.get_vision_position_ids(theirs, **given),
    )
    expected, _ = MiniCPMV4_7Model.get_rope_index(theirs, ids, kinds, torch.tensor(grids))
    features = np.array(tokens) == FEATURE
    ours = canvas_positions(np.array(tokens), features, grids, marks=tuple(MARKS.values()), merge=4)
    assert ours.tolist() == expected[:, 0].tolist()
