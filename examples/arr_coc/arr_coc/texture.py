"""Thirteen channels of a photo: its colours twice, its edges, and the position of each pixel."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from megavlm.extension import Channels, VisionInput

CHANNELS = (
    *("red", "green", "blue"),
    *("lightness", "green to red", "blue to yellow"),
    *("vertical edges", "horizontal edges", "edges", "coarse edges"),
    *("row", "column"),
    "eccentricity",
)
# Means and deviations. Colours have CLIP's, with which LLaVA's towers are trained; Lab's are about those of photos;
# edges and places need no more than a scale.
MEAN = (0.48145466, 0.4578275, 0.40821073, 50.0, 0.0, 5.0, *(0.0,) * 4, *(0.0,) * 3)
STD = (0.26862954, 0.26130258, 0.27577711, 25.0, 15.0, 20.0, *(0.25,) * 4, *(1.0,) * 3)

_TO_XYZ = np.array(
    [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.1191920, 0.9503041]]
)
_WHITE = np.array([0.95047, 1.0, 1.08883])  # D65


def texture(tile: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Return the thirteen channels [h, w, 13], in the order of CHANNELS, of a tile's colours [h, w, 3]."""
    colours = tile.astype(np.float64) / 255
    lab = to_lab(colours)
    light = lab[..., 0] / 100
    across, down = sobel(light)
    coarse = np.hypot(*sobel(_blurred(light)))
    rows, columns = places(*light.shape)
    channels = (across, down, np.hypot(across, down), coarse, rows, columns, np.hypot(rows, columns))
    return np.concatenate([colours, lab, np.stack(channels, axis=-1)], axis=-1).astype(np.float32)


def to_lab(colours: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return CIE 1976 L*a*b* [h, w, 3] under D65 of sRGB colours from 0 to 1 (IEC 61966-2-1).

    L* is 0 to 100. With t = X / white, f(t) = ∛t, and below (6/29)³ the line that meets it smoothly.
    """
    linear = np.where(colours <= 0.04045, colours / 12.92, ((colours + 0.055) / 1.055) ** 2.4)
    scaled = linear @ _TO_XYZ.T / _WHITE
    f = np.where(scaled > (6 / 29) ** 3, np.cbrt(scaled), scaled / (3 * (6 / 29) ** 2) + 4 / 29)
    x, y, z = np.moveaxis(f, -1, 0)
    return np.stack([116 * y - 16, 500 * (x - y), 200 * (y - z)], axis=-1)


def sobel(light: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the changes of brightness per pixel [h, w] across and down: differences, smoothed by (1, 2, 1) / 4 along
    the edge (Sobel and Feldman 1968). Borders are repeated.
    """
    padded = np.pad(light, 1, mode="edge")
    smooth_down = (padded[:-2] + 2 * padded[1:-1] + padded[2:]) / 4
    smooth_across = (padded[:, :-2] + 2 * padded[:, 1:-1] + padded[:, 2:]) / 4
    return (smooth_down[:, 2:] - smooth_down[:, :-2]) / 2, (smooth_across[2:] - smooth_across[:-2]) / 2


def places(height: int, width: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the row and the column of each pixel [h, w], from −1 to 1 between the tile's borders."""
    rows, columns = (2 * (np.arange(count) + 0.5) / count - 1 for count in (height, width))
    return np.broadcast_to(rows[:, None], (height, width)), np.broadcast_to(columns, (height, width))


def _blurred(light: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return brightness averaged over 5 × 5 pixels; borders are repeated."""
    padded = np.pad(light, 2, mode="edge")
    windows = np.lib.stride_tricks.sliding_window_view(padded, (5, 5))
    return np.asarray(windows.mean(axis=(-2, -1)))


TEXTURE = VisionInput("texture", make=texture, channels=Channels(MEAN, STD))
