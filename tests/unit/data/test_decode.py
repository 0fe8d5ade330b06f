"""Whatever the bytes are, they become upright opaque RGB or a `BadSample` with its reason."""

from __future__ import annotations

import os
import zlib
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, PngImagePlugin, TiffImagePlugin

from megavlm.data.arrays import array_size, read_array
from megavlm.data.decode import MAX_PIXELS, decode, resolve_inside, size_of
from megavlm.inputs.bad_sample import BadSample, Reason
from tests.support.hostile import reason_of

RNG = np.random.default_rng(0)
RED, WHITE = (255, 0, 0), (255, 255, 255)


def encoded(image: Image.Image, file_format: str = "PNG", **options: Any) -> bytes:
    file = BytesIO()
    image.save(file, file_format, **options)
    return file.getvalue()


def noise(mode: str = "RGB", size: tuple[int, int] = (40, 30)) -> Image.Image:
    return Image.fromarray(RNG.integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)).convert(mode)


def chunk(kind: bytes, data: bytes) -> bytes:
    """One of a PNG."""
    return len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big")


def png_header(width: int, height: int) -> bytes:
    """A PNG that announces a size and holds next to nothing."""
    header = width.to_bytes(4, "big") + height.to_bytes(4, "big") + bytes([8, 2, 0, 0, 0])
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


@pytest.mark.parametrize("mode", ["RGB", "L", "1", "P", "CMYK", "YCbCr", "LAB", "I", "F"])
def test_modes_without_transparency_become_rgb_as_pillow_converts_them(mode: str) -> None:
    data = encoded(noise(mode), "TIFF")
    pixels = decode(data)
    assert pixels.dtype == np.uint8
    np.testing.assert_array_equal(pixels, np.asarray(Image.open(BytesIO(data)).convert("RGB")))


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_transparency_lies_over_white(mode: str) -> None:
    image = Image.new("RGBA", (4, 2), (*RED, 0))
    image.putpixel((0, 0), (*RED, 255))
    pixels = decode(encoded(image.convert(mode)))
    assert tuple(pixels[1, 3]) == WHITE
    assert tuple(pixels[0, 0]) != WHITE


def test_sixteen_bits_keep_the_high_byte() -> None:
    values = np.array([[0, 255, 256], [32768, 65280, 65535]], dtype=np.uint16)
    for content in (encoded(Image.fromarray(values)), b"P5 3 2 65535 " + values.astype(">u2").tobytes()):
        np.testing.assert_array_equal(decode(content), np.repeat((values >> 8)[..., None], 3, axis=2))


@pytest.mark.parametrize("orientation", range(1, 10))  # 9 is none
@pytest.mark.parametrize("file_format", ["JPEG", "TIFF"])
def test_exif_orientation_as_pillow_applies_it(file_format: str, orientation: int) -> None:
    from PIL import ImageOps

    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(noise(), file_format, exif=exif)
    expected = np.asarray(ImageOps.exif_transpose(Image.open(BytesIO(data))))
    pixels = decode(data)
    np.testing.assert_array_equal(pixels, expected)
    assert size_of(data) == pixels.shape[:2]


def test_the_size_of_a_png_is_read_without_its_pixels(monkeypatch: pytest.MonkeyPatch) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    plain, turned = encoded(noise()), encoded(noise(), exif=exif)
    behind = plain[:-12] + chunk(b"eXIf", exif.tobytes()[6:]) + plain[-12:]
    assert size_of(behind) == decode(behind).shape[:2] == (40, 30)
    loaded: list[Any] = []
    monkeypatch.setattr(PngImagePlugin.PngImageFile, "load", lambda image: loaded.append(image))
    dated = plain[:-12] + chunk(b"tEXt", b"date:create\x002024-01-01") + plain[-12:]  # ImageMagick's
    assert (size_of(plain), size_of(dated), size_of(turned), loaded) == ((30, 40), (30, 40), (40, 30), [])


def test_damaged_exif_does_not_damage_the_picture() -> None:
    assert decode(encoded(noise(), "JPEG", exif=b"Exif\0\0II*\0\xff\xff\xff\xff\xff")).shape == (30, 40, 3)


@pytest.mark.parametrize("file_format", ["GIF", "PNG", "WEBP"])
def test_of_an_animation_the_first_frame(file_format: str) -> None:
    frames = [Image.new("RGB", (8, 8), colour) for colour in (RED, (0, 0, 255))]
    data = encoded(frames[0], file_format, save_all=True, append_images=frames[1:], lossless=True)
    assert tuple(decode(data)[4, 4]) == RED


@pytest.mark.parametrize("value", [np.nan, np.inf, 0.5, -1.0, -1, 256])
def test_a_tiff_of_other_values_than_bytes_is_a_bad_sample(value: float) -> None:
    buffer = BytesIO()
    kind = np.int32 if isinstance(value, int) else np.float32
    Image.fromarray(np.array([[value, 1]], kind)).save(buffer, "TIFF")
    with pytest.raises(BadSample, match="are not those of 8 bits: save a PNG"):
        decode(buffer.getvalue())


@pytest.mark.parametrize("file_format", ["JPEG", "PNG", "WEBP", "GIF", "TIFF"])
@pytest.mark.parametrize("share", [0.9, 0.5, 0.05])
def test_truncated_files(file_format: str, share: float) -> None:
    data = encoded(noise(size=(200, 150)), file_format)
    assert reason_of(decode, data[: int(len(data) * share)]) in (Reason.TRUNCATED, Reason.CORRUPT, Reason.NOT_AN_IMAGE)
    if file_format in ("JPEG", "PNG") and share > 0.1:
        assert reason_of(decode, data[: int(len(data) * share)]) is Reason.TRUNCATED


def test_a_bomb_is_refused_from_its_header() -> None:
    side = int(MAX_PIXELS**0.5) + 1
    for width, height in ((side, side), (2**31 - 1, 2**31 - 1), (MAX_PIXELS + 1, 1)):
        bomb = png_header(width, height)
        assert reason_of(decode, bomb) is Reason.TOO_LARGE
        assert reason_of(size_of, bomb) is Reason.TOO_LARGE
    assert reason_of(decode, encoded(noise()), max_pixels=40 * 30 - 1) is Reason.TOO_LARGE
    assert size_of(png_header(20_000, 10_000), max_pixels=2**28) == (10_000, 20_000), "more than Pillow allows"


def test_a_bomb_of_text_is_no_image_either() -> None:
    text = PngImagePlugin.PngInfo()
    text.add_text("comment", "a" * 50_000_000, zip=True)
    assert reason_of(decode, encoded(noise(), pnginfo=text)) is Reason.CORRUPT


def test_programs_are_not_started_for_formats() -> None:
    """Pillow would hand PostScript to Ghostscript."""
    assert reason_of(decode, b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n") is Reason.NOT_AN_IMAGE


class TestPaths:
    @pytest.fixture
    def root(self, tmp_path: Path) -> Path:
        root = tmp_path / "images"
        (root / "a").mkdir(parents=True)
        (root / "a" / "x.png").write_bytes(encoded(noise()))
        (tmp_path / "secret.png").write_bytes(encoded(noise()))
        (root / "out").symlink_to(tmp_path)
        (root / "link.png").symlink_to(root / "a" / "x.png")
        (root / "loop").symlink_to(root / "loop")
        os.mkfifo(root / "pipe")
        return root

    @pytest.mark.parametrize("name", ["a/x.png", "a/../a/x.png", "./a/x.png", "link.png", "out/secret.png"])
    def test_inside(self, root: Path, name: str) -> None:
        assert decode(resolve_inside(root, name)).shape == (30, 40, 3)

    @pytest.mark.parametrize(
        "name", ["../secret.png", "a/../../secret.png", "out/../../secret.png", "/etc/hosts", "a\0"]
    )
    def test_outside(self, root: Path, name: str) -> None:
        assert reason_of(resolve_inside, root, name) is Reason.OUTSIDE

    @pytest.mark.parametrize("name", ["", "a", "pipe", "loop", "a/x.png/y", "none.png", "n" * 5000])
    def test_what_is_no_file(self, root: Path, name: str) -> None:
        assert reason_of(resolve_inside, root, name) is Reason.MISSING

    def test_a_file_that_went_away(self, tmp_path: Path) -> None:
        assert reason_of(decode, tmp_path / "gone.png") is Reason.MISSING


def test_a_jpeg_with_too_little_data_for_its_size_is_truncated() -> None:
    buffer = BytesIO()
    Image.new("RGB", (64, 64), "red").save(buffer, "JPEG")
    data = bytearray(buffer.getvalue())
    at = data.index(b"\xff\xc0") + 5  # height and width in the frame header
    data[at : at + 4] = (4000).to_bytes(2, "big") * 2
    for read in (size_of, decode):
        assert reason_of(read, bytes(data)) is Reason.TRUNCATED


@pytest.mark.parametrize("comment", [b"#" + b"x" * 2**22, b"#\n" * 2**20])
def test_a_ppm_with_a_long_comment_is_refused_at_once(comment: bytes) -> None:
    with pytest.raises(BadSample, match="header"):
        decode(b"P6\n" + comment + b"\n1 1 255\nabc")
    assert decode(b"P6\n# made by hand\n1 1\n255\nabc").shape == (1, 1, 3)


def test_a_jpeg_of_very_many_scans_is_a_bad_sample():
    """A scan of some bytes is a pass over all pixels."""
    buffer = BytesIO()
    Image.new("RGB", (64, 64)).save(buffer, "JPEG", progressive=True)
    whole = buffer.getvalue()
    assert decode(whole).shape == (64, 64, 3)
    assert decode(whole + b"\xff\xda" * 200).shape == (64, 64, 3), "a clip behind the picture, as of phones"
    assert reason_of(decode, whole[:-2] + b"\xff\xfe\0\2" * 2**16 + whole[-2:]) is Reason.CORRUPT
    last = whole[whole.rindex(b"\xff\xda") : -2]
    many = whole[:-2] + last * (111 - whole.count(b"\xff\xda")) + whole[-2:]
    assert array_size(many, channels=3, max_pixels=MAX_PIXELS) == size_of(many) == (64, 64)
    for read in (decode, partial(read_array, channels=3, max_pixels=MAX_PIXELS)):
        with pytest.raises(BadSample, match="111 scans"):
            read(many)


def in_pieces(count: int) -> dict[str, bytes]:
    """Pictures whose parts Pillow reads one by one."""
    png, gif = encoded(noise()), encoded(noise("P"), "GIF")
    start, frame = gif.index(b","), png.index(b"IDAT") - 4
    return {
        "chunks": png[:frame] + chunk(b"teXt", b"") * count + png[frame:],
        "comments": gif[:start] + b"!\xfe\x01a\0" * count + gif[start:],
        "strips": encoded(noise(size=(1, count)), "TIFF", tiffinfo={TiffImagePlugin.ROWSPERSTRIP: 1}),
        "strips of BigTIFF": encoded(
            noise(size=(1, count)), "TIFF", big_tiff=True, tiffinfo={TiffImagePlugin.ROWSPERSTRIP: 1}
        ),
    }


@pytest.mark.parametrize("name", in_pieces(1))
def test_a_picture_in_very_many_pieces_is_a_bad_sample(name: str, tmp_path: Path) -> None:
    """A chunk of 12 bytes costs 12 µs: 50 MB of them are ten minutes."""
    assert decode(in_pieces(1_000)[name]).shape in ((30, 40, 3), (1_000, 1, 3))
    file = tmp_path / name
    file.write_bytes(in_pieces(100_000)[name])
    for source in (file, file.read_bytes()):
        with pytest.raises(BadSample, match=r"in (too many|100000) pieces: save it again"):
            size_of(source)


def test_a_picture_that_is_a_text_with_very_many_comments_is_a_bad_sample() -> None:
    head, rest = b"P3 64 64 255\n" + b"#\n" * 2048, b"1 " * 64 * 64 * 3
    assert decode(head + b"1 #x\n" * 900 + rest).shape == (64, 64, 3)
    for text in (head + b"1 #x\n" * 2000 + rest, head + rest + b" " * 2**26):
        with pytest.raises(BadSample, match="a long text, or has many comments"):
            size_of(text)


@pytest.mark.parametrize(("width", "slow"), [(4096, False), (4097, True)])
def test_a_large_picture_that_is_decoded_in_python_is_a_bad_sample(width: int, slow: bool) -> None:
    pixels = b"P5 %d 2048 3 " % width
    with pytest.raises(BadSample, match="slow to read: save a PNG" if slow else "truncated|not enough|bytes"):
        decode(pixels)
    with pytest.raises(BadSample, match="slow to read"):
        decode(b"P3 4096 683 255 ")  # of three values for each pixel
    assert not slow or size_of(b"P5 %d 2048 255 " % width) == (2048, width), "PPMs of 255 are read by C"
