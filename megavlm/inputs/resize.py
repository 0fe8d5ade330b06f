"""Resize images, bit-exact with Pillow, or with torch at three times the speed and nearly the same values.

Pillow resamples one axis, rounds to bytes, and resamples the other, with weights of 22 bits. torch does the same with
vector instructions and weights of 15 bits. One pass of torch is always within one grey level of Pillow's: its error is
far below a half before rounding. The second pass reads bytes some of which are off by one, and if neighbours are off
in the same direction, it may add another level. Measured on photographs: 99.6 % of values are equal and the rest are
one grey level off, except for up to 43 in a million that are two off (noise: up to 145, three off). Therefore torch is
used only if `fast` is set.
The target sizes of each family follow its reference implementation. Rounding is part of each rule: one image token
more or less shifts all later tokens of the sequence.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import PIL
from numpy.typing import NDArray
from packaging.version import Version
from PIL import Image
from PIL.Image import Resampling

from megavlm.inputs.bad_sample import BadSample, Reason

if TYPE_CHECKING:
    from torch import Tensor

Size = tuple[int, int]  # (height, width) or (rows, columns)

_MOST_ELONGATED = 200  # aspect ratio above which Qwen's processor refuses an image
LARGEST_SIDE = 4096  # longest side of a resized image in Idefics3


def shortest_edge(size: Size, edge: int) -> Size:
    """Scale a size so that its shorter side is `edge`, at the same aspect ratio (CLIP)."""
    short, long = sorted(size)
    scaled = int(edge * long / short)
    return (scaled, edge) if size[1] <= size[0] else (edge, scaled)


def smart_resize(size: Size, *, factor: int, min_pixels: int, max_pixels: int, frames: int = 1, span: int = 1) -> Size:
    """Scale a size to multiples of `factor`, with an area in [min_pixels, max_pixels] and about the same aspect ratio.

    This is the rule of Qwen2-VL and its successors. For Qwen3-VL's videos, the bounds hold for all `frames` together,
    rounded to a multiple of `span`, the frames in a patch.

    Raises BadSample for images more elongated than 1:200, which the reference refuses.
    """
    height, width = size
    if max(size) / min(size) > _MOST_ELONGATED:
        raise BadSample(Reason.TOO_NARROW, f"{height}×{width} pixels are more elongated than 1:{_MOST_ELONGATED}")
    rows, columns = round(height / factor), round(width / factor)
    pixels = round(frames / span) * span * rows * columns * factor**2
    if pixels > max_pixels:
        shrink = math.sqrt(frames * height * width / max_pixels)
        rows, columns = (max(1, math.floor(side / shrink / factor)) for side in size)
    elif pixels < min_pixels:
        grow = math.sqrt(min_pixels / (frames * height * width))
        rows, columns = (math.ceil(side * grow / factor) for side in size)
    return rows * factor, columns * factor


def at_least(size: Size, side: int) -> Size:
    """Enlarge a size, if necessary, so that no side is shorter than `side` (Qwen3-VL's videos)."""
    enlarged = max(side / size[0], side / size[1], 1.0)
    return int(size[0] * enlarged), int(size[1] * enlarged)


def best_resolution(size: Size, resolutions: Iterable[Size]) -> Size:
    """Return the resolution that keeps most of the image's pixels; ties go to the least padding (LLaVA-NeXT)."""
    height, width = size

    def merit(resolution: Size) -> tuple[int, int]:
        scale = min(resolution[1] / width, resolution[0] / height)
        kept = min(int(width * scale) * int(height * scale), width * height)
        return kept, kept - resolution[0] * resolution[1]

    return max(resolutions, key=merit)  # the first of the best


def fit_inside(size: Size, frame: Size) -> Size:
    """Scale a size to the largest of its aspect ratio that fits in `frame`; the side that gets padded is rounded up."""
    height, width = size
    by_height, by_width = frame[0] / height, frame[1] / width
    if by_width < by_height:
        return min(math.ceil(height * by_width), frame[0]), frame[1]
    return frame[0], min(math.ceil(width * by_height), frame[1])


def tile_grid(size: Size, tile: Size, *, fewest: int, most: int) -> Size:
    """Return the grid (rows, columns) of tiles whose aspect ratio is closest to the image's (InternVL).

    Of equally close grids the larger one is chosen, if the image has more than half of that grid's pixels.
    """
    height, width = size
    best, smallest = (1, 1), math.inf
    for rows, columns in _grids(fewest, most):
        difference = abs(width / height - columns / rows)
        fills = height * width > 0.5 * tile[0] * tile[1] * rows * columns
        if difference < smallest or (difference == smallest and fills):
            best, smallest = (rows, columns), difference
    return best


@cache
def _grids(fewest: int, most: int) -> tuple[Size, ...]:
    """Return all (rows, columns) with `fewest` to `most` tiles, in ascending order of tiles, then of columns."""
    grids = [(rows, columns) for columns in range(1, most + 1) for rows in range(1, most + 1)]
    return tuple(sorted((g for g in grids if fewest <= g[0] * g[1] <= most), key=lambda g: g[0] * g[1]))


def longest_edge(size: Size, edge: int) -> Size:
    """Scale a size so that its longer side is `edge` and the other even, then limit it to `LARGEST_SIDE` (Idefics3)."""
    height, width = size
    ratio = width / height
    if width >= height:
        height, width = _even(int(edge / ratio)), edge
    else:
        height, width = edge, _even(int(edge * ratio))
    height, width = max(height, 1), max(width, 1)
    ratio, longest = width / height, max(height, width)
    if longest > LARGEST_SIDE and width >= height:
        height, width = int(LARGEST_SIDE / ratio), LARGEST_SIDE
    elif longest > LARGEST_SIDE:
        height, width = LARGEST_SIDE, int(LARGEST_SIDE * ratio)
    return max(height, 1), max(width, 1)


def whole_tiles(size: Size, tile: int) -> Size:
    """Return the grid (rows, columns) of tiles after rounding the longer side up to whole tiles (Idefics3)."""
    height, width = size
    ratio = width / height
    if width >= height:
        columns = math.ceil(width / tile)
        return math.ceil(int(columns * tile / ratio) / tile), columns
    rows = math.ceil(height / tile)
    return rows, math.ceil(int(rows * tile * ratio) / tile)


def _even(side: int) -> int:
    return side + side % 2


Pixels = NDArray[Any]  # [height, width, C]: bytes of RGB, or float32 of any number of channels (`data/arrays.py`)

_TORCH_MODES = {
    Resampling.BILINEAR: "bilinear",
    Resampling.BICUBIC: "bicubic",
    Resampling.LANCZOS: "lanczos",
}
_FEWEST_FOR_TORCH = 4  # sides of one pixel make its memory formats ambiguous, and some of them fail
_PILLOW_CHOOSES_AN_ORDER = Version(PIL.__version__) >= Version("13")


def resize(pixels: Pixels, height: int, width: int, resample: Resampling, *, fast: bool = False) -> Pixels:
    """Resize `pixels` [h, w, C] to [height, width, C]; return the same array if it already has this size.

    Pillow resizes, or torch if `fast` is set and torch has the filter. Pixels that are not bytes are resized by
    Pillow's filters, channel by channel, without rounding.
    """
    old, new = (pixels.shape[0], pixels.shape[1]), (height, width)
    if old == new:
        return pixels
    if pixels.dtype != np.uint8:
        channels = [Image.fromarray(np.ascontiguousarray(channel)) for channel in np.moveaxis(pixels, -1, 0)]
        return np.stack([np.asarray(each.resize((width, height), resample)) for each in channels], axis=-1)
    mode = _TORCH_MODES.get(resample)
    if not fast or mode is None or not _torch_knows(mode) or min(*old, *new) < _FEWEST_FOR_TORCH:
        return np.array(Image.fromarray(pixels).resize((width, height), resample))
    import torch

    planes = torch.from_numpy(pixels if pixels.flags.writeable else pixels.copy()).permute(2, 0, 1)[None]
    if vertical_first(old, new):  # torch always begins with the horizontal pass
        planes = _by_torch(planes, (height, old[1]), mode)
    return _by_torch(planes, new, mode)[0].permute(1, 2, 0).numpy()


def resize_as_torchvision(pixels: Pixels, height: int, width: int, resample: Resampling) -> Pixels:
    """Resize `pixels` [h, w, 3] to [height, width, 3] as torchvision does, which reference processors use for videos.

    Pillow resizes if torch lacks the filter or a side is shorter than 4 pixels.
    """
    old, new, mode = pixels.shape[:2], (height, width), _TORCH_MODES.get(resample)
    if old == new or mode is None or not _torch_knows(mode) or min(*old, *new) < _FEWEST_FOR_TORCH:
        return resize(pixels, height, width, resample)
    import torch

    planes = torch.from_numpy(pixels).permute(2, 0, 1)[None]
    return _by_torch(planes, new, mode)[0].permute(1, 2, 0).numpy()


def vertical_first(old: tuple[int, int], new: tuple[int, int]) -> bool:
    """Return whether Pillow resamples the vertical axis first for these sizes (height, width). Pillow 12 never does."""
    fewer_rows, fewer_columns = old[0] - new[0], old[1] - new[1]
    return _PILLOW_CHOOSES_AN_ORDER and fewer_rows > 0 and fewer_rows > 2 * fewer_columns


def _by_torch(planes: Tensor, size: tuple[int, int], mode: str) -> Tensor:
    import torch

    return torch.nn.functional.interpolate(planes, size, mode=mode, antialias=True)


@cache
def _torch_knows(mode: str) -> bool:
    """Return whether torch can resize bytes in this mode; Lanczos was added after torch 2.8."""
    import torch

    try:
        _by_torch(torch.zeros(1, 3, 8, 8, dtype=torch.uint8), (4, 4), mode)
    except (NotImplementedError, ValueError):
        return False
    return True
