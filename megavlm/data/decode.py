"""Decode untrusted image files to RGB pixels, or raise BadSample with the reason.

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
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from megavlm.inputs.bad_sample import BadSample, Reason
from megavlm.storage.store import StoreError
from megavlm.storage.transfer import StoredFile

Source = bytes | Path | StoredFile  # an image file: its content, its path, or a file in a store

MAX_PIXELS = 2**26  # 67 megapixels: 192 MiB as RGB
# A list, because Pillow also reads formats that start other programs (EPS) or that do not hold photos.
_WANTED = ("JPEG", "MPO", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000", "AVIF")
Image.init()  # loads Pillow's plugins; some are built without AVIF or JPEG 2000
FORMATS = tuple(name for name in _WANTED if name in Image.OPEN)

# A JPEG has at least one bit per block of 8×8 pixels. If the data end early, its decoder fills the rest with grey.
_PIXELS_PER_BYTE = 8 * 64
_LARGEST = 2**29  # bytes of an image file in a store
_HEAD = 2**16  # bytes of an image file in a store that are fetched for its size
TIFF, _OFFSETS = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+"), (273, 324)  # the last two are BigTIFF; tags of offsets
_JPEG, _SCAN, _END = b"\xff\xd8", b"\xda", b"\xd9"
_MARKER = re.compile(rb"\xff([\x02-\xcf\xd8-\xfe])")  # of a JPEG, but for those without a length among its pixels
_MOST_SCANS = 100  # most scans of a JPEG; progressive JPEGs have about ten
_PIECES, _PIECE = 2**16, 64  # most reads of a file: _PIECES, plus one per _PIECE bytes (PNGs need some per 8 KiB)
_SLOW_VALUES = 2**23  # most values of an image that Pillow decodes in Python: run-length BMPs, some PPMs
_HEADER = 4096  # bytes in which the header of a PPM ends
_PLAIN = (b"P1", b"P2", b"P3")  # PPMs in text form: for each comment, Pillow copies up to a megabyte
_TEXT, _MOST_COMMENTS = 2**26, 1000  # most bytes and comments of a PPM in text form
ORIENTATION = 0x0112
_NOTES = (b"Raw profile type exif", b"XML:com.adobe.xmp")  # texts of a PNG that say its orientation
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
LYING = (5, 6, 7, 8)
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
    """Return the path of the file `name` inside the folder `root`; `name` may be absolute, and may have backslashes.

    Raises BadSample if the name leads out of `root` (an absolute path elsewhere, `..`), or is not that of a file. Links
    inside `root` are followed wherever they lead: `data/coco` is often one to another disk, and only who may write
    there can make one, which no record does.
    """
    if "\0" in name:
        raise BadSample(Reason.OUTSIDE, f"the path {name!r} contains a null character")
    root = root.absolute()
    path = Path(os.path.normpath(root / name))
    try:
        if not path.is_relative_to(root):  # an absolute name may spell the folder in another way
            root, path = _resolved(root), path.resolve()
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
    """Return a path with symbolic links resolved; cached, because each part of the path costs a system call."""
    return root.resolve()


def size_of(source: Source, *, max_pixels: int = MAX_PIXELS) -> tuple[int, int]:
    """Return the (height, width) in pixels of the image that `decode` will return, read from the file's header alone.

    Of a JPEG in a store, only the beginning is fetched. Raises BadSample if the file is not an image or has more than
    `max_pixels` pixels.
    """
    return _stored_size(source, max_pixels) if isinstance(source, StoredFile) else _size(source, max_pixels)


@lru_cache(maxsize=2**16)
def _stored_size(source: StoredFile, max_pixels: int) -> tuple[int, int]:
    """Return the (height, width) of an image in a store; cached, because a look-up costs two requests."""
    with _from_store():
        head, length = source.head(at_most=_HEAD)
    if length == len(head):
        return _size(head, max_pixels)
    return _size_in(head, length, max_pixels) or _size(content_of(source), max_pixels)


def _size(source: bytes | Path, max_pixels: int) -> tuple[int, int]:
    with as_bad_sample(), open_image(source, max_pixels) as image:
        return upright_size(image)


def _size_in(head: bytes, length: int, max_pixels: int) -> tuple[int, int] | None:
    """Return the (height, width) of an image of `length` bytes from its first bytes `head`; None if more are needed.

    Only JPEGs are read in this way: their size and orientation precede the pixels.
    """
    if not head.startswith(_JPEG):
        return None
    try:
        with open_image(head, max_pixels, length=length) as image:
            return upright_size(image)
    except _DAMAGED:
        return None


def upright_size(image: Image.Image) -> tuple[int, int]:
    """Return the (height, width) of an image once it is turned as its EXIF orientation says."""
    width, height = image.size  # Pillow says the upright size of a TIFF
    return (width, height) if image.format != "TIFF" and _orientation(image) in LYING else (height, width)


@contextmanager
def _from_store() -> Iterator[None]:
    try:
        yield
    except StoreError as error:
        raise BadSample(Reason.MISSING, str(error)) from error


def content_of(source: Source) -> bytes | Path:
    """Return the content or local path of an image file; a file in a store is read. Raises BadSample if that fails."""
    if not isinstance(source, StoredFile):
        return source
    with _from_store():
        return source.read(at_most=_LARGEST)


def decode(source: Source, *, max_pixels: int = MAX_PIXELS) -> NDArray[np.uint8]:
    """Return the RGB pixels [height, width, 3] of an image file, upright and opaque; of an animation, the first frame.

    Raises BadSample for any file that cannot be decoded.
    """
    content = content_of(source)
    with as_bad_sample(), open_pixels(content, max_pixels) as image:
        return np.array(_to_rgb(upright(image)))


def upright(image: Image.Image) -> Image.Image:
    """Return an image with its pixels, turned as its EXIF orientation says."""
    image.load()  # which turns a TIFF upright
    orientation = _orientation(image)
    return image.transpose(_UPRIGHT[orientation]) if orientation in _UPRIGHT else image


@contextmanager
def as_bad_sample() -> Iterator[None]:
    """Raise a BadSample in place of any exception of Pillow's parsers within this context."""
    try:
        yield
    except _DAMAGED as error:
        raise _typed(error) from error


@contextmanager
def open_image(source: bytes | Path, max_pixels: int, *, length: int | None = None) -> Iterator[Image.Image]:
    """Open an image file within this context; `length` is its size in bytes if `source` is only its beginning.

    Raises BadSample if the image is too large, truncated or slow to read.
    """
    _check_header(source)
    Image.MAX_IMAGE_PIXELS = max(Image.MAX_IMAGE_PIXELS or 0, max_pixels)  # Pillow's own bound, of 179 megapixels
    content = _Clipped(BytesIO(source) if isinstance(source, bytes) else FileIO(source), _length(source))
    with content, Image.open(content, formats=FORMATS) as image:
        width, height = image.size
        if width * height > max_pixels:
            raise BadSample(
                Reason.TOO_LARGE, f"the image has {height}×{width} pixels, more than --max-image-pixels {max_pixels}"
            )
        if image.format in ("JPEG", "MPO") and (length or _length(source)) < width * height // _PIXELS_PER_BYTE:
            raise BadSample(
                Reason.TRUNCATED, f"the image says that it has {height}×{width} pixels, and has data for fewer"
            )
        if width * height * len(image.getbands()) > _SLOW_VALUES and any(
            tile[0] in Image.DECODERS for tile in image.tile[:1]
        ):
            raise BadSample(
                Reason.TOO_LARGE, f"the image has {height}×{width} pixels that are slow to read: save a PNG"
            )
        if width < 1 or height < 1:
            raise BadSample(Reason.CORRUPT, f"the image has a size of {height}×{width} pixels")
        yield image


@contextmanager
def open_pixels(source: bytes | Path, max_pixels: int) -> Iterator[Image.Image]:
    """Open an image file whose pixels will be read within this context.

    Raises BadSample also for a JPEG with very many scans: a scan is a pass over all pixels, and may have few bytes.
    """
    with open_image(source, max_pixels) as image:
        if image.format in ("JPEG", "MPO"):
            scans = _scans(source if isinstance(source, bytes) else source.read_bytes())
            if scans > _MOST_SCANS:
                raise BadSample(Reason.CORRUPT, f"the image has {scans} scans, more than {_MOST_SCANS}")
        yield image


def _scans(content: bytes) -> int:
    """Return the number of scans of a JPEG, behind which a clip may follow (photos of phones). Raises BadSample."""
    scans, at = 0, len(_JPEG)
    for _ in range(_PIECES):
        found = _MARKER.search(content, at)
        if found is None or found[1] == _END:
            return scans
        scans += found[1] == _SCAN
        at = found.end() + int.from_bytes(content[found.end() : found.end() + 2])
    raise BadSample(Reason.CORRUPT, "the image is in too many pieces: save it again")


class _Clipped(BufferedReader):
    """Reader of a file of `size` bytes that bounds the size and the number of reads.

    Pillow requests as many bytes as a header claims, up to 4 GiB at once. It also reads chunks, comments, strips and
    segments one by one, and a file may have millions of these.
    """

    def __init__(self, raw: Any, size: int) -> None:
        super().__init__(raw)
        self._size = size
        self._left = _PIECES + size // _PIECE

    def read(self, size: int | None = -1) -> bytes:
        """Return up to `size` bytes, or all that are left. Raises BadSample after very many reads."""
        self._left -= 1
        if self._left < 0:
            raise BadSample(Reason.CORRUPT, "the image is in too many pieces: save it again")
        if size is None or size < 0:
            return super().read()
        return super().read(min(size, max(0, self._size - self.tell())))


def _length(source: bytes | Path) -> int:
    return len(source) if isinstance(source, bytes) else source.stat().st_size


def _check_header(source: bytes | Path) -> None:
    """Raise BadSample for a header that makes Pillow slow.

    These are: a PPM with a long header, which Pillow reads byte by byte; a plain PPM that is very long or has very many
    comments; and a TIFF with very many strips or tiles, of which Pillow makes a list.
    """
    with BytesIO(source) if isinstance(source, bytes) else source.open("rb") as file:
        head = file.read(_HEADER)
        if head.startswith(TIFF) and (count := _most_values(file, head)) > _PIECES:
            raise BadSample(Reason.CORRUPT, f"the image is in {count} pieces: save it again")
        if head.startswith(_PLAIN) and (file.read(_TEXT).count(b"#") > _MOST_COMMENTS or file.read(1)):
            raise BadSample(Reason.TOO_LARGE, "the image is a long text, or has many comments: save a PNG")
    if head[:1] == b"P" and head[1:2].isdigit():
        words = [word for line in head.split(b"\n") for word in line.partition(b"#")[0].split()]
        if len(head) == _HEADER and len(words) < 4:
            raise BadSample(Reason.CORRUPT, f"its header has more than {_HEADER} bytes")


def _most_values(file: IO[bytes], head: bytes) -> int:
    """Return the number of strip or tile offsets in the first directory of a TIFF or BigTIFF; 0 if it is damaged."""
    order, large = "<" if head[:1] == b"I" else ">", 43 in head[2:4]
    place, number, entry = ("8xQ", "Q", "HHQ8x") if large else ("4xI", "H", "HHI4x")
    try:
        file.seek(struct.unpack_from(order + place, head)[0])
        (count,) = struct.unpack(order + number, file.read(struct.calcsize(order + number)))
        listed = file.read(struct.calcsize(order + entry) * min(count, _PIECES))
        return max(
            (values for tag, _, values in struct.iter_unpack(order + entry, listed) if tag in _OFFSETS), default=0
        )
    except (struct.error, ValueError, OverflowError):
        return 0  # Pillow says what is wrong with it


def _orientation(image: Image.Image) -> int:
    """Return the EXIF orientation, 1 to 8; 1 (upright) if the image has none or it cannot be read."""
    try:
        if image.format == "PNG" and not _has_notes_behind(image):
            return int(Image.Image.getexif(image).get(ORIENTATION, 1))
        return int(image.getexif().get(ORIENTATION, 1))
    except _DAMAGED:  # the pixels may be intact although the metadata are damaged
        return 1


def _has_notes_behind(image: Any) -> bool:
    """Return whether a PNG has EXIF or XMP behind its pixels, for which Pillow decodes these, or they are decoded."""
    if not image.tile:
        return True
    file, at, place, behind, found = image.fp, image.fp.tell(), 8, False, False
    while not found and file.seek(place) and len(head := file.read(32)) >= 8:
        behind = behind or head[4:8] == b"IDAT"
        found = behind and (head[4:8] == b"eXIf" or head[8:].startswith(_NOTES))
        place += 12 + int.from_bytes(head[:4])
    file.seek(at)
    return found


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PPM"):  # which Pillow scales to 16 bits
        return Image.fromarray((np.array(image) >> 8).astype(np.uint8)).convert("RGB")
    if image.mode in ("I", "F"):
        values = np.array(image)
        low, high = values.min(), values.max()
        if not (low >= 0 and 1 < high <= 255):  # would be black or white, as values that are not finite
            raise BadSample(Reason.UNSUPPORTED, f"its values, {low:g} to {high:g}, are not those of 8 bits: save a PNG")
    if "A" in image.getbands() or image.info.get("transparency") is not None:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(white, image).convert("RGB")
    return image if image.mode == "RGB" else image.convert("RGB")  # which would be a copy


def _typed(error: Exception) -> BadSample:
    """Convert an exception of Pillow to a BadSample with the reason."""
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
