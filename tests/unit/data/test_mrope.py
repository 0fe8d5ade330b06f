"""M-RoPE positions: text moves on by one, an image takes one moment and as many positions as its longer side."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megavlm.data.collate import Run, mrope_positions
from megavlm.families.shared.videos import moments_of

IMAGE = 9


def test_an_image_between_words() -> None:
    tokens = np.array([1, 1, *[IMAGE] * 6, 1, 1])
    time, row, column = mrope_positions(tokens == IMAGE, stills((4, 6)), merge=2).tolist()
    assert time == [0, 1, 2, 2, 2, 2, 2, 2, 5, 6]
    assert row == [0, 1, 2, 2, 2, 3, 3, 3, 5, 6]
    assert column == [0, 1, 2, 3, 4, 2, 3, 4, 5, 6]


def test_images_without_words_between_them() -> None:
    tokens = np.array([*[IMAGE] * 4, IMAGE, *[IMAGE] * 2, 1])
    positions = mrope_positions(tokens == IMAGE, stills((2, 2), (1, 1), (2, 1)), merge=1)
    assert positions[0].tolist() == [0, 0, 0, 0, 2, 3, 3, 5]
    assert positions[1].tolist() == [0, 0, 1, 1, 2, 3, 4, 5]
    assert positions[2].tolist() == [0, 1, 0, 1, 2, 3, 3, 5]


Piece = tuple[int, int, int, int]  # words before it, rows and columns of features, groups of frames (0: an image)


@settings(deadline=None, max_examples=25)  # the first example imports Transformers
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4), st.integers(1, 4), st.integers(0, 4)), max_size=4),
    st.integers(0, 3),
    st.sampled_from([0.5, 1.0, 0.7, 3.3]),
)
def test_equals_transformers(pieces: list[Piece], words_after: int, seconds: float) -> None:
    """`get_rope_index` of Qwen2.5-VL, which needs a word between two images; a group of frames lasts `seconds`."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")

    config = transformers.Qwen2_5_VLConfig()
    model = transformers.Qwen2_5_VLModel.__new__(transformers.Qwen2_5_VLModel)
    torch.nn.Module.__init__(model)
    model.config = config
    kinds = [t for words, rows, columns, groups in pieces for t in kinds_of(words, rows * columns, groups)]
    kinds += [0] * (words_after + 1)
    step = config.vision_config.tokens_per_second
    expected, _ = model.get_rope_index(
        torch.zeros(1, len(kinds), dtype=torch.long),
        mm_token_type_ids=torch.tensor(kinds).int()[None],
        image_grid_thw=torch.tensor([(1, 2 * r, 2 * c) for _, r, c, groups in pieces if not groups]),
        video_grid_thw=torch.tensor([(groups, 2 * r, 2 * c) for _, r, c, groups in pieces if groups]),
        second_per_grid_ts=torch.tensor([seconds for *_, groups in pieces if groups]),
    )
    runs = [
        ((2 * rows, 2 * columns), moments_of(groups, seconds, step) if groups else (0,))
        for _, rows, columns, groups in pieces
    ]
    assert mrope_positions(np.array(kinds) > 0, runs, merge=2).tolist() == expected[:, 0].tolist()


def kinds_of(words: int, features: int, groups: int) -> list[int]:
    return [0] * (words + 1) + ([2] * (features * groups) if groups else [1] * features)


def stills(*grids: tuple[int, int]) -> list[Run]:
    return [(grid, (0,)) for grid in grids]
