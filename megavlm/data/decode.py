"""From bytes of unknown origin to RGB pixels, or to the reason why not.

What is done to a picture is what Hugging Face's loaders do: EXIF orientation is applied, transparency is laid over
white, and everything else goes through Pillow's conversion to RGB. One thing differs on purpose: greyscale of 16 bits
keeps its high byte, where Pillow's conversion would turn every value above 255 white.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from functools import lru_cache
from io import BytesIO
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageFile, UnidentifiedImageError

from megavlm.data.types import BadSample, Reason

MAX_PIXELS = 2**26  # 67 megapixels: 192 MiB as RGB
# Named, because Pillow also reads formats that start programs (EPS) or that nobody keeps photos in.
_WANTED = ("JPEG", "MPO", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000", "AVIF")
Image.init()  # loads Pillow's plugins; some are built without AVIF or JPEG 2000
FORMATS = tuple(name for name in _WANTED if name in Image.OPEN)

_ORIENTATION = 0x0112
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
# What Pillow's parsers let through where bytes are not what they should be. Not among them: want of memory, and
# mistakes of this program, which are no reason to leave a picture out.
_DAMAGED = (
    OSError,  # unidentified, truncated or missing as well
    SyntaxError,  # broken PNG chunks
    ValueError,
    TypeError,
    LookupError,
    ArithmeticError,
    AttributeError,
    AssertionError,
    EOFError,
    RuntimeError,
    struct.error,
    zlib.error,
    Image.DecompressionBombError,
)


@dataclass(frozen=True, eq=False)
class Decoded:
    """Pixels [height, width, 3], uint8 RGB; `animated` where they are the first of several frames."""

    pixels: NDArray[np.uint8]
    animated: bool


def resolve_inside(root: Path, name: str) -> Path:
    """The file that `name` means below `root`.

    Raises BadSample when it lies outside, by an absolute path, by `..` or by a symbolic link, and when it is no file.
    """
    if "\0" in name:
        raise BadSample(Reason.OUTSIDE, f"{name!r} is not a path")
    root = _resolved(root.absolute())
    try:
        path = (root / name).resolve()
        inside, is_file = path.is_relative_to(root), path.is_file()  # a pipe or a device would block who opens it
    except (OSError, RuntimeError, UnicodeEncodeError) as error:  # too long, a loop of links, half a character
        raise BadSample(Reason.MISSING, f"{name[:200]!r}: {error}") from error
    if Path(name).is_absolute() or not inside:
        raise BadSample(Reason.OUTSIDE, f"{name!r} leaves {root}")
    if not is_file:
        raise BadSample(Reason.MISSING, f"{path} is not a file")
    return path


@lru_cache(maxsize=256)
def _resolved(root: Path) -> Path:
    """Once for all images below it: each part of a path is a question to the file system."""
    return root.resolve()


def size_of(source: bytes | Path, *, max_pixels: int = MAX_PIXELS) -> tuple[int, int]:
    """(height, width) that `decode` will give, from the header alone.

    Raises BadSample for what is no image or holds more than `max_pixels`.
    """
    try:
        with _open(source, max_pixels) as image:
            width, height = image.size
            return (width, height) if _orientation(image) >= 5 else (height, width)
    except _DAMAGED as error:
        raise _typed(error) from error


def decode(source: bytes | Path, *, max_pixels: int = MAX_PIXELS) -> Decoded:
    """Pixels of an encoded image, upright and opaque. Raises BadSample, and nothing else, whatever the bytes are."""
    try:
        with _open(source, max_pixels) as image:
            animated = getattr(image, "n_frames", 1) > 1
            orientation = _orientation(image)
            image.load()
            upright = image.transpose(_UPRIGHT[orientation]) if orientation in _UPRIGHT else image
            return Decoded(np.array(_to_rgb(upright)), animated)
    except _DAMAGED as error:
        raise _typed(error) from error


def _open(source: bytes | Path, max_pixels: int) -> ImageFile.ImageFile:
    image = Image.open(BytesIO(source) if isinstance(source, bytes) else source, formats=FORMATS)
    width, height = image.size
    if width * height > max_pixels:
        image.close()
        raise BadSample(Reason.TOO_LARGE, f"{height}×{width} pixels are more than {max_pixels}")
    if width < 1 or height < 1:
        image.close()
        raise BadSample(Reason.CORRUPT, f"{height}×{width} pixels")
    return image


def _orientation(image: Image.Image) -> int:
    """EXIF's 1 … 8; 1, upright, where there is none or it cannot be read."""
    try:
        return int(image.getexif().get(_ORIENTATION, 1))
    except _DAMAGED:  # damaged metadata does not damage the picture
        return 1


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I;16"):
        return Image.fromarray((np.array(image) >> 8).astype(np.uint8)).convert("RGB")
    if "A" in image.getbands() or image.info.get("transparency") is not None:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(white, image).convert("RGB")
    return image.convert("RGB")


def _typed(error: Exception) -> BadSample:
    match error:
        case BadSample():
            return error
        case FileNotFoundError() | IsADirectoryError() | NotADirectoryError() | PermissionError():
            return BadSample(Reason.MISSING, str(error))
        case UnidentifiedImageError():
            where = str(error).partition("file ")[2]  # a path, or the address of an object, which tells nobody anything
            return BadSample(Reason.NOT_AN_IMAGE, f"no known format{'' if where.endswith('>') else f': {where}'}")
        case Image.DecompressionBombError():
            return BadSample(Reason.TOO_LARGE, str(error))
    told = "truncated" in str(error).lower() or isinstance(error, EOFError)
    return BadSample(Reason.TRUNCATED if told else Reason.CORRUPT, f"{type(error).__name__}: {error}")
