"""Cut images into normalised patches, and join the patches of several video frames."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from megavlm.arch.image_tokens import Grid, grid_of

if TYPE_CHECKING:
    from torch import Tensor

    from megavlm.inputs.layout import Film


_TOGETHER = 256  # patches that are normalised at once, few enough to stay in a core's cache


def patchify(
    image: NDArray[Any],
    patch_size: int,
    *,
    mean: float | Sequence[float] = 0.5,
    std: float | Sequence[float] = 0.5,
) -> Tensor:
    """Return the normalised patches [rows·columns, C·p·p], float32, of an image [height, width, C].

    Patches are row-major. Within a patch the order is (channel, row, column), as in a flattened Conv2d weight
    [H, C, p, p], so that a linear layer over patches computes the same as that convolution with stride p.
    """
    return normalised([cells_of(image, patch_size)], 1, mean=mean, std=std)


def cells_of(image: NDArray[Any], patch_size: int) -> NDArray[Any]:
    """Return the unnormalised patches [rows·columns, C, p·p], row-major, of an image [height, width, C]."""
    height, width, channels = image.shape
    rows, columns = grid_of(height, width, patch_size)
    cells = image.reshape(rows, patch_size, columns, patch_size, channels)
    return cells.transpose(0, 2, 4, 1, 3).reshape(rows * columns, channels, patch_size**2)


def normalised(
    frames: Sequence[NDArray[Any]], span: int, *, mean: float | Sequence[float], std: float | Sequence[float]
) -> Tensor:
    """Join the patches [P, C, p·p] of `span` consecutive frames and normalise: [groups·P, C·span·p·p], float32. The
    last group is completed by repeating the last frame.

    Within a patch the order is (channel, frame, row, column), as in a flattened Conv3d weight. Normalisation is
    (x / 255 − mean) / std of bytes and (x − mean) / std of other numbers, with one mean and std or one per channel. It
    runs in numpy, because torch would start threads of its own in the loader's thread.
    """
    import torch  # not at the top: `families` import image processors, and load without torch

    count, channels, area = frames[0].shape
    groups = -(-len(frames) // span)
    means, stds = np.broadcast_to(mean, channels), np.broadcast_to(std, channels)
    unit = 255 if frames[0].dtype == np.uint8 else 1
    factor, shift = (each[:, None].astype(np.float32) for each in (1 / (unit * stds), means / stds))
    patches = np.empty((groups, count, channels, span, area), np.float32)
    for place in range(groups * span):
        frame, target = frames[min(place, len(frames) - 1)], patches[place // span, :, :, place % span]
        for start in range(0, count, _TOGETHER):
            part = target[start : start + _TOGETHER]
            np.multiply(frame[start : start + _TOGETHER], factor, out=part)
            part -= shift
    return torch.from_numpy(patches.reshape(groups * count, -1))


@dataclass(frozen=True, eq=False)
class Image:
    """An image of known size, rendered on demand.

    `render` is a pure function that returns the pixels [height, width, channels] as bytes.
    """

    height: int
    width: int
    patch_size: int
    render: Callable[[], NDArray[np.uint8]]
    arrangement: tuple[int, int] = (0, 0)
    film: Film | None = None

    @property
    def grids(self) -> tuple[Grid, ...]:
        return (grid_of(self.height, self.width, self.patch_size),)

    def patches(self) -> Tensor:
        return patchify(self.render(), self.patch_size)


@dataclass(frozen=True, eq=False)
class LoadedImage:
    """An image or a video with its patches in memory."""

    grids: tuple[Grid, ...]
    pixels: Tensor  # [P, D] patches of all grids
    arrangement: tuple[int, int] = (0, 0)
    film: Film | None = None

    def patches(self) -> Tensor:
        return self.pixels
