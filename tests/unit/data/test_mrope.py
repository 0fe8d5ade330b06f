"""M-RoPE positions: text moves on by one, an image takes one moment and as many positions as its longer side."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megavlm.data.collate import mrope_positions

IMAGE = 9


def test_an_image_between_words() -> None:
    tokens = np.array([1, 1, *[IMAGE] * 6, 1, 1])
    time, row, column = mrope_positions(tokens, [(4, 6)], image_token=IMAGE, merge=2).tolist()
    assert time == [0, 1, 2, 2, 2, 2, 2, 2, 5, 6]
    assert row == [0, 1, 2, 2, 2, 3, 3, 3, 5, 6]
    assert column == [0, 1, 2, 3, 4, 2, 3, 4, 5, 6]


def test_images_without_words_between_them() -> None:
    tokens = np.array([*[IMAGE] * 4, IMAGE, *[IMAGE] * 2, 1])
    positions = mrope_positions(tokens, [(2, 2), (1, 1), (2, 1)], image_token=IMAGE, merge=1)
    assert positions[0].tolist() == [0, 0, 0, 0, 2, 3, 3, 5]
    assert positions[1].tolist() == [0, 0, 1, 1, 2, 3, 4, 5]
    assert positions[2].tolist() == [0, 1, 0, 1, 2, 3, 3, 5]


def test_text_alone_counts() -> None:
    assert mrope_positions(np.ones(5, dtype=np.int64), [], image_token=IMAGE, merge=2).tolist() == [list(range(5))] * 3


@settings(deadline=None, max_examples=25)  # the first example imports Transformers
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4), st.integers(1, 4)), max_size=4), st.integers(0, 3))
def test_equals_transformers(images: list[tuple[int, int, int]], words_after: int) -> None:
    """`get_rope_index` of Qwen2.5-VL, which needs a word between two images."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")

    config = transformers.Qwen2_5_VLConfig()
    model = transformers.Qwen2_5_VLModel.__new__(transformers.Qwen2_5_VLModel)
    torch.nn.Module.__init__(model)
    model.config = config
    grids = [(2 * rows, 2 * columns) for _, rows, columns in images]
    tokens = [t for words, rows, columns in images for t in [1] * (words + 1) + [IMAGE] * (rows * columns)]
    ids = np.array([*tokens, *[1] * (words_after + 1)])
    expected, _ = model.get_rope_index(
        torch.from_numpy(ids)[None],
        mm_token_type_ids=torch.from_numpy(ids == IMAGE).int()[None],
        image_grid_thw=torch.tensor([(1, *grid) for grid in grids]),
    )
    assert mrope_positions(ids, grids, image_token=IMAGE, merge=2).tolist() == expected[:, 0].tolist()
