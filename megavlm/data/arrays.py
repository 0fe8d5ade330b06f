"""Read images of any number of channels and any depth: NumPy arrays, TIFF, and photos in their own mode.

A file's format is detected from its content, not its name: `.npy`, `.npz` (its only array, or the array named "image"),
TIFF with any number of samples per pixel, and all formats of `decode.py` in their own mode, such as greyscale of 16
bits. Nothing is unpickled, and nothing larger than `max_pixels` pixels of the expected channels is read.
"""

from __future__ import annotations

import logging
import lzma
import math
import threading
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import SEEK_END, BufferedReader, BytesIO
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from megavlm.data.decode import (
    LYING,
    ORIENTATION,
    TIFF,
    Source,
    as_bad_sample,
    content_of,
    open_image,
    open_pixels,
    upright,
    upright_size,
)
from megavlm.errors import UserError
from megavlm.inputs.bad_sample import BadSample, Reason
from megavlm.paths import open_regular

Array = NDArray[np.float32]  # [height, width, channels]

_NPY, _ZIP = b"\x93NUMPY", b"PK\x03\x04"
_HEADERS: dict[tuple[int, int], Callable[[IO[bytes]], Any]] = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}
# NumPy parses a header with `ast`, which raises SystemError in Python 3.11 if threads that use it take turns.
_ONE_HEADER = threading.Lock()
_NUMBERS = "buif"  # kinds of dtypes: bool, integers and real numbers
_MOST_CHANNELS = 16  # bounds the values of an image (per pixel of the largest) if the number of channels is not known
_MOST_PIECES = 2**16  # strips or tiles of a TIFF
_ITEM = 8  # bytes of the largest number
# TIFF compressions that tifffile decompresses without a bound, and the largest factor by which a piece can expand.
_EXPANDING: dict[int, tuple[Callable[[], Any], int]] = {
    8: (zlib.decompressobj, 2**11),
    32946: (zlib.decompressobj, 2**11),
    34925: (lzma.LZMADecompressor, 2**14),
}
_LEAST = 2**26  # bytes that a decompressed piece may always have


def array_size(source: Source, *, channels: int | None, max_pixels: int) -> tuple[int, int]:
    """Return the (height, width) of an image of `channels` channels, read from the file's header.

    If `channels` is None, the shorter of the first and last of three dimensions is the channels. Raises BadSample if
    the file cannot be read, or has other channels or more than `max_pixels` pixels.
    """
    return _read(source, channels, max_pixels, pixels=False).shape[:2]


def read_array(source: Source, *, channels: int | None, max_pixels: int) -> Array:
    """Return an image as float32 [height, width, channels] in the file's own units.

    If `channels` is None, the shorter of the first and last of three dimensions is the channels. Raises BadSample if
    the file cannot be read, or has other channels, more than `max_pixels` pixels, or numbers that are not finite.
    """
    found = _read(source, channels, max_pixels, pixels=True).astype(np.float32)
    if not np.isfinite(found).all():
        raise BadSample(Reason.CORRUPT, "it has values that are not finite: fill them in before training")
    return found


def is_array(source: Source) -> bool:
    """Return whether a file is `.npy` or `.npz`, which Pillow does not read. Raises BadSample if its store lacks it."""
    content = content_of(source)
    try:
        with _opened(content) as file:
            return file.read(6).startswith((_NPY, _ZIP))
    except OSError:
        return False  # `decode` says why it cannot be opened


def as_picture(pixels: NDArray[Any]) -> NDArray[np.uint8]:
    """Return the first three channels of an image [h, w, C], or its first as grey, as RGB bytes [h, w, 3] for display.

    In each channel, the 2nd to the 98th percentile are scaled to 0 to 255.
    """
    shown = pixels[..., :3] if pixels.shape[-1] >= 3 else pixels[..., :1].repeat(3, axis=-1)
    low, high = np.percentile(shown, (2, 98), axis=(0, 1))
    return np.asarray(np.clip((shown - low) / np.maximum(high - low, 1e-12), 0, 1) * 255).astype(np.uint8)


def _read(source: Source, channels: int | None, max_pixels: int, *, pixels: bool) -> NDArray[Any]:
    """Return an image [h, w, C]; without `pixels`, an array of its shape that takes no memory. Raises BadSample."""
    content = content_of(source)

    def fitting(shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        """Raise BadSample for a shape or type that is not allowed, before the values are read."""
        if dtype.kind not in _NUMBERS or dtype.itemsize > _ITEM:
            raise BadSample(Reason.NOT_AN_IMAGE, f"it holds values of type {dtype}, not numbers")
        height, width, _ = _channels_last(_empty(shape, np.dtype(np.uint8)), channels).shape
        if height * width > max_pixels:
            raise BadSample(
                Reason.TOO_LARGE, f"the image has {height}×{width} pixels, more than --max-image-pixels {max_pixels}"
            )
        if math.prod(shape) > max_pixels * (channels or _MOST_CHANNELS):
            raise BadSample(Reason.TOO_LARGE, f"it has {math.prod(shape)} values, more than --max-image-pixels allows")

    try:
        with _opened(content) as file:
            head = file.read(6)
            file.seek(0)
            if head.startswith(_NPY):
                found = _npy(file, fitting, pixels)
            elif head.startswith(_ZIP):
                found = _npz(file, fitting, pixels)
            elif head.startswith(TIFF):
                found = _tiff(file, fitting, pixels)
            else:
                found = _photo(content, fitting, max_pixels, pixels)
    except (BadSample, UserError, MemoryError):
        raise
    except FileNotFoundError as error:
        raise BadSample(Reason.MISSING, f"the file cannot be opened: {error}") from error
    except Exception as error:  # whatever a parser raises for a damaged file is a fault of this file alone
        raise BadSample(Reason.CORRUPT, f"it cannot be read ({type(error).__name__}: {error})") from error
    return _channels_last(found, channels)


class _Alone(BufferedReader):
    """A file object without a descriptor, so that tifffile does not open other files.

    If it knows a file's folder, tifffile opens all files that the metadata name (OME, Micro-Manager), anywhere on the
    disk, and includes their content in the image.
    """

    name = "the image"

    def fileno(self) -> int:
        raise OSError("it is read through this object alone")


@contextmanager
def _opened(content: bytes | Path) -> Iterator[IO[bytes]]:
    with BytesIO(content) if isinstance(content, bytes) else _Alone(open_regular(content, buffering=0)) as file:  # type: ignore[arg-type]
        yield file


Fitting = Callable[[tuple[int, ...], np.dtype[Any]], None]


def _npy(file: IO[bytes], fitting: Fitting, pixels: bool) -> NDArray[Any]:
    version = np.lib.format.read_magic(file)
    if version not in _HEADERS:
        raise BadSample(Reason.UNSUPPORTED, f"it is a .npy file of version {version[0]}.{version[1]}: save it again")
    with _ONE_HEADER:
        shape, in_columns, dtype = _HEADERS[version](file)
    fitting(shape, dtype)
    if not pixels:
        return _empty(shape, dtype)
    size = math.prod(shape) * dtype.itemsize
    content = file.read(size)
    if len(content) < size:
        raise BadSample(Reason.TRUNCATED, f"it ends after {len(content)} of {size} bytes")
    return np.frombuffer(content, dtype).reshape(shape, order="F" if in_columns else "C")


def _npz(file: IO[bytes], fitting: Fitting, pixels: bool) -> NDArray[Any]:
    with zipfile.ZipFile(file) as archive:
        names = [name for name in archive.namelist() if name.endswith(".npy")]
        chosen = "image.npy" if "image.npy" in names else names[0] if len(names) == 1 else None
        if chosen is None:
            arrays = ", ".join(name.removesuffix(".npy") for name in names[:8])
            raise BadSample(
                Reason.NOT_AN_IMAGE, f"the .npz file has the arrays {arrays or 'none'}: name the image's array image"
            )
        with archive.open(chosen) as member:
            return _npy(member, fitting, pixels)


def _tiff(file: IO[bytes], fitting: Fitting, pixels: bool) -> NDArray[Any]:
    try:
        import tifffile
    except ImportError as error:
        raise UserError("--vision-input array reads TIFF with tifffile: pip install tifffile") from error
    logging.getLogger(tifffile.__name__).disabled = True  # a damaged file is reported with its record
    with tifffile.TiffFile(file, _multifile=False) as tiff:  # else the image has zeros in place of unopened files
        series = tiff.series[0]
        fitting(series.shape, np.dtype(series.dtype))
        pieces = series.keyframe.databytecounts  # each piece is unpacked, even if many share the same bytes
        if len(pieces) > _MOST_PIECES or sum(pieces) > 2 * file.seek(0, SEEK_END):
            raise BadSample(Reason.CORRUPT, "its strips or tiles are too many, or overlap: save it again")
        if pixels:
            _check_expansion(file, series)
        found = np.asarray(series.asarray(maxworkers=1)) if pixels else _empty(series.shape, np.dtype(series.dtype))
        return _turned(found, series.axes, series.keyframe.tags.valueof(ORIENTATION, 1))


def _turned(array: NDArray[Any], axes: str, orientation: int) -> NDArray[Any]:
    """Return an array turned upright by a TIFF's orientation (1 to 8); `axes` names its axes, as in "SYX"."""
    if orientation == 1:
        return array
    rows, columns = axes.index("Y"), axes.index("X")
    turned = array.swapaxes(rows, columns) if orientation in LYING else array
    flipped = [rows] * (orientation in (3, 4, 7, 8)) + [columns] * (orientation in (2, 3, 6, 7))
    return np.flip(turned, tuple(flipped))


def _check_expansion(file: IO[bytes], series: Any) -> None:
    """Raise BadSample for a strip or tile of a TIFF that decompresses to far more than the whole image."""
    if (expanding := _EXPANDING.get(series.keyframe.compression)) is None:
        return
    make, factor = expanding
    most = max(_LEAST, 2 * math.prod(series.shape) * series.dtype.itemsize)
    for page in filter(None, series.pages):
        for place, count in zip(page.dataoffsets, page.databytecounts, strict=True):
            if count * factor > most:
                file.seek(place)
                if len(make().decompress(file.read(count), most + 1)) > most:
                    raise BadSample(Reason.CORRUPT, "a strip or tile becomes larger than the image: save it again")


def _photo(content: bytes | Path, fitting: Fitting, max_pixels: int, pixels: bool) -> NDArray[Any]:
    with as_bad_sample(), (open_pixels if pixels else open_image)(content, max_pixels) as image:
        if image.mode == "P":
            raise BadSample(Reason.UNSUPPORTED, "it has a palette, so its values are no intensities: save it without")
        shape = (*upright_size(image), len(image.getbands()))
        fitting(shape, np.dtype(np.uint8))
        return np.asarray(upright(image)) if pixels else _empty(shape, np.dtype(np.uint8))


def _empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    return np.broadcast_to(np.zeros((), dtype), shape)


def _channels_last(array: NDArray[Any], channels: int | None) -> NDArray[Any]:
    """Return an array [h, w, C], [C, h, w] or, for one channel, [h, w] as [h, w, C].

    If the first and the last dimension could both be the channels, the last is. Further dimensions of length 1 are
    dropped. Raises BadSample for another shape.
    """
    shape = array.shape
    while array.ndim > 3 and 1 in array.shape:
        array = array.squeeze(array.shape.index(1))
    if array.ndim == 2:
        array = array[..., None]
    if channels is None and array.ndim == 3:
        channels = min(array.shape[0], array.shape[-1])
    if array.ndim == 3 and array.shape[-1] != channels and array.shape[0] == channels:
        array = np.moveaxis(array, 0, -1)
    if array.ndim != 3 or array.shape[-1] != channels or 0 in array.shape:
        sides = "×".join(map(str, shape))
        wanted = f"{channels} channels" if channels else "channels"
        raise BadSample(Reason.NOT_AN_IMAGE, f"it has the shape {sides}, not height × width × {wanted}")
    return array
