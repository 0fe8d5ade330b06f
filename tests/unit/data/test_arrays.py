"""Images of any number of channels: the same pixels out of every format, and one reason for every file that is none."""

from __future__ import annotations

import contextlib
import io
import lzma
import os
import pickle
import threading
import time
import zipfile
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image

from megavlm.data import arrays
from megavlm.data.arrays import array_size, as_picture, is_array, read_array
from megavlm.data.decode import decode
from megavlm.data.types import ImageRef
from megavlm.data.visuals import first_frame
from megavlm.inputs.bad_sample import BadSample, Reason

tifffile = pytest.importorskip("tifffile", reason="pip install 'megavlm[arrays]'")
MOST = 2**20


def image(channels: int, dtype: str, *, height: int = 6, width: int = 9) -> NDArray[Any]:
    values = np.random.default_rng(channels).integers(0, 200, (height, width, channels))
    return (values * (1.5 if dtype.startswith("float") else 1)).astype(dtype)


def npy(array: NDArray[Any]) -> bytes:
    out = io.BytesIO()
    np.save(out, array)
    return out.getvalue()


def npz(array: NDArray[Any]) -> bytes:
    out = io.BytesIO()
    np.savez_compressed(out, image=array, mask=np.zeros(3))
    return out.getvalue()


def in_columns(array: NDArray[Any]) -> bytes:
    return npy(np.asfortranarray(array))


def channels_first(array: NDArray[Any]) -> bytes:
    return npy(np.moveaxis(array, -1, 0))


def tiff(array: NDArray[Any]) -> bytes:
    out = io.BytesIO()
    tifffile.imwrite(out, array, photometric="minisblack", planarconfig="contig")
    return out.getvalue()


def planes(array: NDArray[Any]) -> bytes:
    out = io.BytesIO()
    tifffile.imwrite(out, np.moveaxis(array, -1, 0), photometric="minisblack", compression="zlib")
    return out.getvalue()


@pytest.mark.parametrize("write", [npy, npz, in_columns, channels_first, tiff, planes])
@pytest.mark.parametrize(("channels", "dtype"), [(13, "float32"), (5, "uint16"), (4, "int16"), (7, "float64")])
def test_every_format_gives_the_same_pixels(write, channels, dtype, tmp_path):
    pixels = image(channels, dtype)
    content = write(pixels)
    (tmp_path / "any.name").write_bytes(content)
    for source in (content, tmp_path / "any.name"):
        assert array_size(source, channels=channels, max_pixels=MOST) == (6, 9)
        read = read_array(source, channels=channels, max_pixels=MOST)
        assert read.dtype == np.float32
        np.testing.assert_array_equal(read, pixels.astype(np.float32))


@pytest.mark.parametrize(
    ("mode", "dtype", "channels"), [("I;16", "uint16", 1), ("L", "uint8", 1), ("RGBA", "uint8", 4)]
)
def test_photos_keep_their_mode(mode: str, dtype: str, channels: int) -> None:
    """16 bits stay, and transparency is a channel, where photos become RGB bytes otherwise. All are upright."""
    pixels = image(channels, dtype) * (300 if dtype == "uint16" else 1)
    for orientation, upright in ((1, pixels), (6, np.rot90(pixels, -1))):
        (exif := Image.Exif())[0x0112] = orientation
        Image.fromarray(pixels[..., 0] if channels == 1 else pixels).save(out := io.BytesIO(), "PNG", exif=exif)
        assert Image.open(io.BytesIO(out.getvalue())).mode == mode
        assert array_size(out.getvalue(), channels=channels, max_pixels=MOST) == upright.shape[:2]
        np.testing.assert_array_equal(read_array(out.getvalue(), channels=channels, max_pixels=MOST), upright)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_tiff_is_turned_as_a_photo_is(orientation: int) -> None:
    pixels, tag = image(3, "uint8"), [(0x0112, "H", 1, orientation, True)]
    tifffile.imwrite(photo := io.BytesIO(), pixels, photometric="rgb", extratags=tag)
    tifffile.imwrite(apart := io.BytesIO(), np.moveaxis(pixels, -1, 0), photometric="minisblack", extratags=tag)
    upright = decode(photo.getvalue())
    for file in (photo, apart):
        assert array_size(file.getvalue(), channels=3, max_pixels=MOST) == upright.shape[:2]
        np.testing.assert_array_equal(read_array(file.getvalue(), channels=3, max_pixels=MOST), upright)


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return (pytest.fail, ("a pickle was loaded",))


def object_array() -> bytes:
    out = io.BytesIO()
    np.save(out, np.array([Evil()], dtype=object), allow_pickle=True)
    return out.getvalue()


def two_arrays() -> bytes:
    out = io.BytesIO()
    np.savez(out, left=np.zeros(3), right=np.zeros(3))
    return out.getvalue()


def bomb() -> bytes:
    """Gigabytes of zeros in a small archive, behind a header that says so."""
    head = io.BytesIO()
    np.lib.format.write_array_header_1_0(head, {"descr": "<f4", "fortran_order": False, "shape": (2**15, 2**15, 5)})
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("image.npy", head.getvalue())
    return out.getvalue()


def overlapping() -> bytes:
    """A TIFF whose strips are said to reach over all of it, so that it is unpacked again and again."""
    out = io.BytesIO()
    tifffile.imwrite(out, np.zeros((300, 9, 5), "uint8"), planarconfig="contig", compression="zlib", rowsperstrip=1)
    out.seek(0)
    with tifffile.TiffFile(out) as file:
        sizes = file.pages[0].tags["StripByteCounts"]
    whole = out.getvalue()
    width = 2 * sizes.count if sizes.dtype == 3 else 4 * sizes.count
    lying = len(whole).to_bytes(width // sizes.count, "little") * sizes.count
    return whole[: sizes.valueoffset] + lying + whole[sizes.valueoffset + width :]


def expanding(compression: str) -> bytes:
    """A TIFF of which one strip becomes 64 MB, where its image has 32 kB."""
    out = io.BytesIO()
    tifffile.imwrite(out, image(5, "uint8", height=64, width=100), planarconfig="contig", compression=compression)
    out.seek(0)
    with tifffile.TiffFile(out) as file:
        places, sizes = file.pages[0].tags["StripOffsets"], file.pages[0].tags["StripByteCounts"]
    zeros = bytes(2**26 + 1)
    strip = zlib.compress(zeros, 1) if compression == "zlib" else lzma.compress(zeros, preset=0)
    content = bytearray(out.getvalue())
    for tag, value in ((places, len(content)), (sizes, len(strip))):
        content[tag.valueoffset : tag.valueoffset + 4] = value.to_bytes(4, "little")
        content[tag.offset + 2 : tag.offset + 4] = (4).to_bytes(2, "little")  # a number of four bytes
    return bytes(content) + strip


def palette() -> bytes:
    out = io.BytesIO()
    Image.fromarray(image(1, "uint8")[..., 0]).convert("P").save(out, "PNG")
    return out.getvalue()


@pytest.mark.parametrize(
    ("content", "reason", "words"),
    [
        (overlapping(), Reason.CORRUPT, "its strips or tiles are too many, or overlap: save it again"),
        (expanding("zlib"), Reason.CORRUPT, "a strip or tile becomes larger than the image: save it again"),
        (expanding("lzma"), Reason.CORRUPT, "a strip or tile becomes larger than the image: save it again"),
        (npy(image(4, "uint8")), Reason.NOT_AN_IMAGE, "shape 6×9×4, not height × width × 5 channels"),
        (npy(np.zeros((2, 6, 9, 5))), Reason.NOT_AN_IMAGE, "shape 2×6×9×5"),
        (npy(np.zeros((0, 9, 5))), Reason.NOT_AN_IMAGE, "shape 0×9×5"),
        (npy(np.zeros((6, 9, 5), complex)), Reason.NOT_AN_IMAGE, "values of type complex128"),
        (object_array(), Reason.NOT_AN_IMAGE, "values of type object"),
        (npy(image(5, "float32"))[:-8], Reason.TRUNCATED, "ends after 1072 of 1080 bytes"),
        (two_arrays(), Reason.NOT_AN_IMAGE, "has the arrays left, right: name the image's array image"),
        (bomb(), Reason.TOO_LARGE, "has 32768×32768 pixels"),
        (npy(np.full((6, 9, 5), np.nan)), Reason.CORRUPT, "not finite: fill them in"),
        (b"\x93NUMPY\x07\x00" + bytes(100), Reason.UNSUPPORTED, r"version 7\.0"),
        (b"PK\x03\x04" + bytes(100), Reason.CORRUPT, "BadZipFile"),
        (b"II*\0" + bytes(100), Reason.CORRUPT, "cannot be read"),
        (b"no image at all", Reason.NOT_AN_IMAGE, "not of a known image format"),
        (palette(), Reason.UNSUPPORTED, "palette"),
        (pickle.dumps(Evil()), Reason.NOT_AN_IMAGE, "not of a known image format"),
    ],
)
def test_what_is_no_image_says_why(content: bytes, reason: Reason, words: str) -> None:
    with pytest.raises(BadSample, match=words) as caught:
        read_array(content, channels=5, max_pixels=MOST)
    assert caught.value.reason == reason


OME = """<OME xmlns="http://www.openmicroscopy.org/Schemas/OME/2016-06" UUID="urn:uuid:{own}"><Image ID="I:0">
<Pixels ID="P:0" DimensionOrder="XYCZT" Type="uint8" SizeX="9" SizeY="6" SizeC="2" SizeZ="1" SizeT="1"><TiffData IFD="0"
FirstC="0" PlaneCount="1"><UUID FileName="a.tif">urn:uuid:1</UUID></TiffData><TiffData IFD="0" FirstC="1"
PlaneCount="1"><UUID FileName="../secret.tif">urn:uuid:2</UUID></TiffData></Pixels></Image></OME>"""


def test_a_tiff_opens_no_other_file(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    file = tmp_path / "images/a.tif"
    for number, path in enumerate((file, tmp_path / "secret.tif"), start=1):
        tifffile.imwrite(path, image(1, "uint8")[..., 0], description=OME.format(own=number), metadata=None)
    with tifffile.TiffFile(file) as both:
        assert both.series[0].shape == (2, 6, 9), "tifffile opens it by itself"
    for source in (file, file.read_bytes()):
        with pytest.raises(BadSample, match="shape 6×9, not height × width × 2 channels"):
            read_array(source, channels=2, max_pixels=MOST)


def test_a_fifo_in_place_of_an_array_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.npy")
    with pytest.raises(BadSample, match="is no regular file"):
        read_array(tmp_path / "a.npy", channels=2, max_pixels=MOST)


def test_threads_take_turns_at_headers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3.11's `ast`, with which NumPy parses them, fails now and then where threads interleave."""
    reader, inside = arrays._HEADERS[1, 0], threading.Lock()

    def alone(file: Any) -> Any:
        assert inside.acquire(blocking=False), "another thread parses a header"
        time.sleep(0.001)
        inside.release()
        return reader(file)

    monkeypatch.setitem(arrays._HEADERS, (1, 0), alone)
    file = io.BytesIO()
    np.save(file, np.zeros((4, 6, 5), np.float32))
    with ThreadPoolExecutor(4) as pool:
        sizes = pool.map(lambda _: array_size(file.getvalue(), channels=5, max_pixels=100), range(20))
        assert list(sizes) == [(4, 6)] * 20


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_damaged_files_raise_nothing_else(data: st.DataObject) -> None:
    """A byte is changed, or the file is cut: the sample is skipped or read, and the run goes on."""
    content = bytearray(data.draw(st.sampled_from([npy, npz, tiff, planes]))(image(5, "uint16")))
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    damaged = bytes(content[: data.draw(st.integers(0, len(content)))])
    with contextlib.suppress(BadSample):
        assert read_array(damaged, channels=5, max_pixels=MOST).shape[-1] == 5


def test_a_page_shows_an_array_as_a_picture() -> None:
    shown = first_frame(ImageRef(npy(image(5, "float32", height=16, width=20))), max_pixels=MOST)
    assert (shown.shape, shown.dtype) == ((16, 20, 3), np.uint8)
    assert shown.min() == 0
    assert shown.max() >= 254
    assert as_picture(np.ones((4, 4, 1))).shape == (4, 4, 3)
    assert is_array(npy(image(2, "uint8")))
    assert not is_array(palette())


def test_any_number_of_channels_is_bounded_before_it_is_read():
    buffer = io.BytesIO()
    np.savez_compressed(buffer, image=np.zeros((60, 1, 60), np.uint8))
    with pytest.raises(BadSample, match="3600 values"):
        array_size(buffer.getvalue(), channels=None, max_pixels=64)
