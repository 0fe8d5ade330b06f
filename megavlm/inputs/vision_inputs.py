"""Input channels of the vision encoder: RGB, the channels of an array file, or channels computed from RGB."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megavlm.config.messages import did_you_mean, plain
from megavlm.config.registry import Entry, registered
from megavlm.errors import UserError
from megavlm.json_files import Expected, check, listed, number, read_json
from megavlm.program import program

NAME = "channels.json"  # in a Hugging Face folder: how its model sees images that are not RGB
_LARGEST = 4096  # channels
_EXPECTED: dict[str, Expected] = {
    "mean": listed(number(-1e30, 1e30), 1, _LARGEST),
    "std": listed(number(1e-30, 1e30), 1, _LARGEST),
}

Make = Callable[[NDArray[np.uint8]], NDArray[np.float32]]


@dataclass(frozen=True)
class Channels:
    """The mean and standard deviation of each channel, in the units of the files."""

    mean: tuple[float, ...]
    std: tuple[float, ...]


@dataclass(frozen=True)
class VisionInput:
    """Conversion of an image file to the input channels of the model.

    `make` is a pure function from a tile's RGB bytes [h, w, 3] to its channels, float32 [h, w, channels]. `channels`
    are the statistics for normalisation if none are given. Without `make`, files hold RGB (`RGB`) or arrays.
    """

    name: str
    make: Make | None = None
    channels: Channels | None = None
    array_channels: int | None = None  # number of channels of array files; None: files hold photos


RGB, ARRAY = VisionInput("rgb"), VisionInput("array")


def vision_input_of(name: str, channels: int) -> VisionInput:
    """Return the vision input called `name`, for a model with `channels` input channels. Raises UserError, with a
    suggestion, for an unknown name.
    """
    own, added = {RGB.name: RGB, ARRAY.name: replace(ARRAY, array_channels=channels)}, registered("inputs")
    if name in own:
        return own[name]
    if not isinstance(entry := added.get(name), Entry):
        hint = did_you_mean(name, (*own, *added)) or f": choose one of {', '.join((*own, *added))}"
        raise UserError(f"--vision-input {plain(name)} is not known{hint}")
    found = entry.load()
    if not isinstance(found, VisionInput):
        raise UserError(f"--vision-input {name} is a {type(found).__name__}: make it a VisionInput")
    return found


def measured(images: Iterable[NDArray[Any]]) -> Channels:
    """Return the mean and standard deviation of each channel over all pixels of the images [h, w, C].

    Moments are merged image by image (Chan et al. 1979), which loses no digits if the mean is far above the
    deviation: with n and n′ pixels, δ the difference of the means, M₂ = M₂ + M₂′ + δ²·n·n′ / (n + n′).
    """
    count, mean, squares = 0, np.zeros(1), np.zeros(1)
    for image in images:
        pixels = image.reshape(-1, image.shape[-1]).astype(np.float64)
        own, own_mean = len(pixels), pixels.mean(axis=0)
        delta, total = own_mean - mean, count + own
        squares = squares + ((pixels - own_mean) ** 2).sum(axis=0) + delta**2 * count * own / total
        mean, count = mean + delta * own / total, total
    if not count:
        raise UserError("no image can be read, so its channels have no statistics: name a data set with images")
    # A channel that is the same everywhere tells nothing: 1 leaves it at zero.
    std = np.sqrt(squares / count)
    return Channels(tuple(mean.tolist()), tuple(np.where(std > 0, std, 1.0).tolist()))


def channels_json(name: str, channels: Channels) -> str:
    """Return the JSON text of `channels.json`: the name of a vision input and the statistics of its channels."""
    return json.dumps({"vision_input": name, "mean": channels.mean, "std": channels.std}, indent=1) + "\n"


def read_channels(file: Path) -> tuple[str | None, Channels]:
    """Read channel statistics from a file; return the name of their vision input (None if absent) and the statistics.

    Raises UserError if the file does not hold statistics.
    """
    values = read_json(file)
    check(values, _EXPECTED, str(file))
    mean, std = (tuple(map(float, values.get(name) or ())) for name in _EXPECTED)
    if not mean or len(mean) != len(std):
        raise UserError(
            f"{file} has {len(mean)} means and {len(std)} deviations: {program('channels')} writes such files"
        )
    said = values.get("vision_input")
    return (said if isinstance(said, str) else None), Channels(mean, std)
