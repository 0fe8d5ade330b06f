"""Resizing against Pillow: the same bytes, or nearly so when `fast`, and then with the axes in Pillow's order."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from PIL.Image import Resampling

from megavlm.inputs.resize import Pixels, resize

sides = st.integers(1, 90)


def difference(pixels: Pixels, height: int, width: int, resample: Resampling, *, fast: bool = True) -> np.ndarray:
    ours = resize(pixels, height, width, resample, fast=fast)
    theirs = np.asarray(Image.fromarray(pixels).resize((width, height), resample))
    assert ours.dtype == np.uint8
    assert ours.shape == (height, width, 3)
    return np.abs(ours.astype(int) - theirs)


@settings(max_examples=250, deadline=None)
@given(
    old=st.tuples(sides, sides),
    new=st.tuples(sides, sides),
    resample=st.sampled_from([Resampling.BILINEAR, Resampling.BICUBIC, Resampling.LANCZOS, Resampling.BOX]),
    seed=st.integers(0, 99),
)
def test_noise(old: tuple[int, int], new: tuple[int, int], resample: Resampling, seed: int) -> None:
    """A wrong order of the axes would show here: it is worth tens of grey levels."""
    noise = np.random.default_rng(seed).integers(0, 256, (*old, 3), dtype=np.uint8)
    assert difference(noise, *new, resample).max() <= 2
    assert difference(noise, *new, resample, fast=False).max() == 0


@pytest.mark.parametrize("new", [(224, 224), (336, 448), (384, 384), (700, 500)])
def test_of_a_photograph_over_99_percent_are_equal(new: tuple[int, int]) -> None:
    datasets = pytest.importorskip("sklearn.datasets")
    photograph = np.ascontiguousarray(datasets.load_sample_image("china.jpg"))
    found = difference(photograph, *new, Resampling.BICUBIC)
    assert (found > 0).mean() < 0.01
    assert (found > 1).mean() < 5e-5
    assert found.max() <= 2
