"""Decode image files to RGB pixels, or say why they cannot be decoded.

Images are treated as by Hugging Face's loaders: the EXIF orientation is applied, transparent pixels are blended with
white, and all other modes are converted to RGB by Pillow. One difference is deliberate: 16-bit greyscale keeps its high
byte, where Pillow's conversion would turn every value above 255 white.
"""

from __future__ import annotations

import os
import re
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from io import BufferedReader, BytesIO, FileIO
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from megavlm.inputs.bad_sample import BadSample, Reason
from megavlm.storage.store import StoreError
from megavlm.storage.transfer import StoredFile

Source = bytes | Path | StoredFile  # an image file: its content, or where it is

MAX_PIXELS = 2**26  # 67 megapixels: 192 MiB as RGB
# A list, because Pillow also reads formats that start other programs (EPS) or that do not hold photos.
_WANTED = ("JPEG", "MPO", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000", "AVIF")
Image.init()  # loads Pillow's plugins; some are built without AVIF or JPEG 2000
FORMATS = tuple(name for name in _WANTED if name in Image.OPEN)

_LARGEST = 2**29  # bytes of an image file in a store
_HEAD = 2**16  # bytes of an image file in a store that are fetched for its size
_JPEG = b"\xff\xd8"
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
# The exceptions that Pillow's parsers raise for damaged files. MemoryError is not among them: it is no fault of the
# image.
_DAMAGED = (
    OSError,  # also raised for unidentified, truncated and missing files
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


def resolve_inside(root: Path, name: str) -> Path:
    """Return the path of the file `name`, which is absolute or below the folder `root`; it may be written with the
    backslashes of Windows.

    Raises BadSample if it lies outside `root` (an absolute path elsewhere, `..`, a symbolic link), or is not a file.
    """
    if "\0" in name:
        raise BadSample(Reason.OUTSIDE, f"the path {name!r} contains a null character")
    root = _resolved(root.absolute())
    try:
        path = (root / name).resolve()
        inside, is_file = path.is_relative_to(root), path.is_file()  # opening a pipe could block
    except (OSError, RuntimeError, UnicodeEncodeError) as error:  # too long, a loop of links, a lone surrogate
        raise BadSample(Reason.MISSING, f"the path {name[:200]!r} cannot be resolved: {error}") from error
    if not inside:
        raise BadSample(Reason.OUTSIDE, f"the path {name!r} leads out of image_root, {root}")
    if not is_file and "\\" in name:
        return resolve_inside(root, name.replace("\\", "/"))
    if not is_file and re.match("[A-Za-z]:[/\\\\]", name):
        raise BadSample(Reason.MISSING, f"{name} is a path of Windows: write what follows the folder of the images")
    if not is_file:
        raise BadSample(Reason.MISSING, f"{path} is not a file")
    return path


@lru_cache(maxsize=256)
def _resolved(root: Path) -> Path:
    """Return the path without symbolic links; cached, because each of its parts costs a system call."""
    return root.resolve()


def size_of(source: Source, *, max_pixels: int = MAX_PIXELS) -> tuple[int, int]:
    """Return the (height, width) in pixels of the image that `decode` will return, read from the file's header alone.

    Of a JPEG in a store, only the beginning is fetched. Raises BadSample if the file is not an image or has more than
    `max_pixels` pixels.
    """
    return _stored_size(source, max_pixels) if isinstance(source, StoredFile) else _size(source, max_pixels)


@lru_cache(maxsize=2**16)
def _stored_size(source: StoredFile, max_pixels: int) -> tuple[int, int]:
    """Return the size of an image in a store, which is asked once: each look costs two requests."""
    with _from_store():
        head, length = source.head(at_most=_HEAD)
    if length == len(head):
        return _size(head, max_pixels)
    return _size_in(head, max_pixels) or _size(content_of(source), max_pixels)


def _size(source: bytes | Path, max_pixels: int) -> tuple[int, int]:
    with as_bad_sample(), open_image(source, max_pixels) as image:
        return _upright_size(image)


def _size_in(head: bytes, max_pixels: int) -> tuple[int, int] | None:
    """Return the (height, width) of an image that begins like this; None if the rest is needed.

    A JPEG has its size and orientation before its pixels. Other formats need not.
    """
    if not head.startswith(_JPEG):
        return None
    try:
        with open_image(head, max_pixels) as image:
            return _upright_size(image)
    except _DAMAGED:
        return None


def _upright_size(image: Image.Image) -> tuple[int, int]:
    width, height = image.size
    return (width, height) if _orientation(image) >= 5 else (height, width)


@contextmanager
def _from_store() -> Iterator[None]:
    try:
        yield
    except StoreError as error:
        raise BadSample(Reason.MISSING, str(error)) from error


def content_of(source: Source) -> bytes | Path:
    """Return what can be opened. Raises BadSample for a file that its store does not have."""
    if not isinstance(source, StoredFile):
        return source
    with _from_store():
        return source.read(at_most=_LARGEST)


def decode(source: Source, *, max_pixels: int = MAX_PIXELS) -> NDArray[np.uint8]:
    """Return the RGB pixels [height, width, 3] of an image file, upright and opaque; of an animation, the first frame.

    Raises BadSample for any file that cannot be decoded.
    """
    content = content_of(source)
    with as_bad_sample(), open_image(content, max_pixels) as image:
        orientation = _orientation(image)
        image.load()
        upright = image.transpose(_UPRIGHT[orientation]) if orientation in _UPRIGHT else image
        return np.array(_to_rgb(upright))


@contextmanager
def as_bad_sample() -> Iterator[None]:
    """Raise a BadSample for what Pillow raises within this context."""
    try:
        yield
    except _DAMAGED as error:
        raise _typed(error) from error


@contextmanager
def open_image(source: bytes | Path, max_pixels: int) -> Iterator[Image.Image]:
    """Open an image file within this context. Raises BadSample for one of more pixels than are allowed."""
    with (
        BytesIO(source) if isinstance(source, bytes) else _File(FileIO(source)) as file,
        Image.open(file, formats=FORMATS) as image,
    ):
        width, height = image.size
        if width * height > max_pixels:
            raise BadSample(
                Reason.TOO_LARGE, f"the image has {height}×{width} pixels, more than --max-image-pixels {max_pixels}"
            )
        if width < 1 or height < 1:
            raise BadSample(Reason.CORRUPT, f"the image has a size of {height}×{width} pixels")
        yield image


class _File(BufferedReader):
    """A file of which no more is asked than it has: Pillow passes on what damaged headers claim, up to 4 GiB."""

    def read(self, size: int | None = -1) -> bytes:
        left = max(0, os.fstat(self.fileno()).st_size - self.tell())
        return super().read(left if size is None or size < 0 else min(size, left))


def _orientation(image: Image.Image) -> int:
    """Return the EXIF orientation, 1 to 8; 1 (upright) if the image has none or it cannot be read."""
    try:
        return int(image.getexif().get(_ORIENTATION, 1))
    except _DAMAGED:  # the pixels may be intact although the metadata are damaged
        return 1


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I;16"):
        return Image.fromarray((np.array(image) >> 8).astype(np.uint8)).convert("RGB")
    if image.mode == "F" and not np.isfinite(np.array(image)).all():
        raise BadSample(Reason.CORRUPT, "it has values that are not finite: fill them in before training")
    if "A" in image.getbands() or image.info.get("transparency") is not None:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(white, image).convert("RGB")
    return image.convert("RGB")


def _typed(error: Exception) -> BadSample:
    """Return the BadSample that an exception of Pillow stands for."""
    match error:
        case BadSample():
            return error
        case FileNotFoundError() | IsADirectoryError() | NotADirectoryError() | PermissionError():
            return BadSample(Reason.MISSING, f"the file cannot be opened: {error}")
        case UnidentifiedImageError():
            where = str(error).partition("file ")[2]  # a path, or a Python object's address, which is left out
            name = "the image" if where.endswith(">") else where
            return BadSample(Reason.NOT_AN_IMAGE, f"{name} is not of a known image format")
        case Image.DecompressionBombError():
            return BadSample(Reason.TOO_LARGE, f"Pillow refuses the image: {error}")
    detail = f"the image cannot be decoded ({type(error).__name__}: {error})"
    truncated = "truncated" in str(error).lower() or isinstance(error, EOFError)
    return BadSample(Reason.TRUNCATED if truncated else Reason.CORRUPT, detail)
