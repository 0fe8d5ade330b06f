"""Functions on frames."""

from collections.abc import Sequence

import torch

from torchvision.transforms import InterpolationMode

__all__ = ["InterpolationMode", "grayscale_to_rgb", "normalize", "pad", "resize"]


def resize(
    image: torch.Tensor, size: Sequence[int], interpolation: InterpolationMode | int, antialias: bool = True
) -> torch.Tensor:
    """Return the resized uint8 image, unchanged if it has the size already. A number of a filter is Pillow's."""
    assert image.dtype == torch.uint8
    interpolation = InterpolationMode.BICUBIC if interpolation == 3 else interpolation
    assert interpolation in (InterpolationMode.BICUBIC, InterpolationMode.LANCZOS)
    if tuple(image.shape[-2:]) == tuple(size):
        return image
    frames = image.reshape(-1, *image.shape[-3:])
    resized = torch.nn.functional.interpolate(frames, size=tuple(size), mode=interpolation.value, antialias=antialias)
    return resized.reshape(*image.shape[:-2], *size)


def normalize(image: torch.Tensor, mean: Sequence[float], std: Sequence[float], inplace: bool = False) -> torch.Tensor:
    means, stds = (torch.as_tensor(each, dtype=image.dtype)[:, None, None] for each in (mean, std))
    return (image - means) / stds


def pad(image: torch.Tensor, padding: Sequence[int], fill: int = 0, padding_mode: str = "constant") -> torch.Tensor:
    """Return the image with so many columns and rows more at its left, top, right and bottom."""
    left, top, right, bottom = padding
    return torch.nn.functional.pad(image, (left, right, top, bottom), padding_mode, fill)


def grayscale_to_rgb(image: torch.Tensor) -> torch.Tensor:
    """An image that has colours is returned as it is."""
    assert image.shape[-3] == 3
    return image
