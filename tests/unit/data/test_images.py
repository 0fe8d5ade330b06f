"""Patches are what a strided convolution sees."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megavlm.inputs.patches import patchify


@settings(max_examples=30, deadline=None)
@given(
    rows=st.integers(1, 4),
    columns=st.integers(1, 4),
    patch_size=st.sampled_from([1, 2, 7]),
    channels=st.sampled_from([1, 3]),
    seed=st.integers(0, 99),
)
def test_a_linear_layer_on_patches_is_the_convolution(rows, columns, patch_size, channels, seed):
    rng = np.random.default_rng(seed)
    image = rng.integers(0, 256, size=(rows * patch_size, columns * patch_size, channels), dtype=np.uint8)
    weight = torch.from_numpy(rng.standard_normal((5, channels, patch_size, patch_size)))
    normalised = (torch.from_numpy(image).permute(2, 0, 1).double() / 255 - 0.5) / 0.5

    expected = torch.nn.functional.conv2d(normalised[None], weight, stride=patch_size)[0]  # [5, rows, columns]
    patches = patchify(image, patch_size)
    assert patches.dtype == torch.float32
    assert patches.shape == (rows * columns, channels * patch_size**2)
    torch.testing.assert_close(patches.double() @ weight.flatten(1).T, expected.flatten(1).T, rtol=1e-5, atol=1e-5)


def test_mean_and_std_normalise_the_unit_interval() -> None:
    image = np.array([[[0], [255]]], dtype=np.uint8)
    torch.testing.assert_close(patchify(image, 1, mean=0.25, std=0.1), torch.tensor([[-2.5], [7.5]]))
