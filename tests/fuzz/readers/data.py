"""Readers of data sets: records, samples of tars, the position in a stream of them, images."""

from __future__ import annotations

import io
import itertools
import json
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from PIL import Image, features

from megavlm.config.schema import DatasetConfig
from megavlm.data.decode import decode, size_of
from megavlm.data.records import open_records
from megavlm.data.records.tar_sample import conversation_of_parts
from megavlm.data.records.tars import indexed
from megavlm.inputs.bad_sample import BadSample
from tests.fuzz.child import Reader
from tests.support.tar_shards import sample, write_tar

TURNS = [{"from": "human", "value": "<image>What?"}, {"from": "gpt", "value": "A cat."}]
MESSAGES = [
    {"role": "user", "content": [{"type": "image", "image": "a.jpg"}, {"type": "text", "text": "Hi"}]},
    {"role": "assistant", "content": "Hello"},
]
RECORDS = [
    {"id": 1, "image": "a.jpg", "conversations": TURNS},
    {"images": ["a.jpg"], "messages": [{"role": "user", "content": "<image>Hi"}, MESSAGES[1]]},
    {"messages": MESSAGES, "system": "Be kind."},
    {"text": "A text.", "images": [{"bytes": None, "path": "a.jpg"}]},
    {"image": "data:image/png;base64,iVBORw0KGgo=", "conversations": TURNS},
]
KINDS = ("PNG", "JPEG", "GIF", "WEBP", "TIFF", "PPM", "BMP", "JPEG2000", "AVIF", "MPO")
MODES = ("RGB", "L", "1", "P", "RGBA", "CMYK", "I;16", "LA")


def picture(kind: str, mode: str = "RGB", **options: Any) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (40, 30), "red").convert("I" if mode == "I;16" else mode).convert(mode).save(
        buffer, kind, **options
    )
    return buffer.getvalue()


@cache
def pictures() -> list[bytes]:
    found = []
    for kind, mode in itertools.product(KINDS, MODES):
        with suppress(OSError, KeyError, ValueError, AttributeError):  # kinds that this Pillow cannot write
            found.append(picture(kind, mode))
    frames = [Image.new("RGB", (20, 10), colour) for colour in ("red", "blue", "green")]
    for kind in ("GIF", "PNG", "WEBP", "TIFF", "AVIF"):
        with suppress(OSError, KeyError, ValueError):
            buffer = io.BytesIO()
            frames[0].save(buffer, kind, save_all=True, append_images=frames[1:])
            found.append(buffer.getvalue())
    if features.check("libtiff"):
        for compression in ("tiff_lzw", "tiff_adobe_deflate", "packbits", "jpeg", "tiff_lzma"):
            with suppress(OSError, RuntimeError):
                found.append(picture("TIFF", compression=compression))
    exif = Image.Exif()
    exif[0x0112] = 6
    return [*found, picture("JPEG", exif=exif, progressive=True), picture("PNG", exif=exif)]


def records(name: str) -> Callable[[Path, bytes], None]:
    def read(folder: Path, data: bytes) -> None:
        (folder / name).write_bytes(data)
        (folder / "a.jpg").write_bytes(b"")
        found = open_records(DatasetConfig(str(folder / name)))
        for number in range(min(len(found), 20)):
            with suppress(BadSample):
                found.read(number)
            assert len(found.label(number)) < 500

    return read


def tar(name: str) -> Callable[[Path, bytes], None]:
    """Read a folder of a tar in which one file (the tar, its index, the split) is `data`."""

    def read(folder: Path, data: bytes) -> None:
        (folder / "d/.nv-meta").mkdir(parents=True)
        write_tar(folder / "d/0.tar", [sample(str(number)) for number in range(3)])
        (folder / "d" / name).write_bytes(data)
        found = open_records(DatasetConfig(str(folder / "d"), kind="webdataset"))
        for number in range(min(len(found), 20)):
            with suppress(BadSample):
                found.read(number)

    return read


@cache
def tar_files() -> dict[str, bytes]:
    with tempfile.TemporaryDirectory() as name:
        path = write_tar(Path(name) / "0.tar", [sample(str(number)) for number in range(3)])
        return {"0.tar": path.read_bytes(), "0.tar.idx": indexed(path).tobytes()}


def parts(folder: Path, data: bytes) -> None:
    """Read samples of a tar whose record is `data`, of each kind, with other files whose names it chooses."""
    names = ("jpg", "1.jpg", f"{'9' * 5000}.png", "x.PNG", "²٣.webp", "a.b.c", "")
    for kind in ("json", "txt", "caption"):
        with suppress(BadSample):
            assert conversation_of_parts({kind: data, **dict.fromkeys(names, b"")}).turns


def image(folder: Path, data: bytes) -> None:
    """Read the size and the pixels of an image, in memory and from a file."""
    (folder / "a.jpg").write_bytes(data)
    with suppress(BadSample):
        size_of(folder / "a.jpg")
    assert decode(data).ndim == 3


LINES = [json.dumps(record).encode() for record in RECORDS]
READERS = {
    "json": Reader(records("a.json"), lambda: [json.dumps([record] * 3).encode() for record in RECORDS], few=40),
    "jsonl": Reader(records("a.jsonl"), lambda: [b"\n".join(LINES[:1] * 3), *LINES], few=40),
    "tar": Reader(tar("0.tar"), lambda: [tar_files()["0.tar"]], few=20),
    "index of a tar": Reader(tar("0.tar.idx"), lambda: [tar_files()["0.tar.idx"]], few=20),
    "split of tars": Reader(tar(".nv-meta/split.yaml"), lambda: [b'{"split_parts": {"train": ["0.tar"]}}'], few=20),
    "tar sample": Reader(parts, lambda: LINES),
    "image": Reader(image, pictures, memory=2**31, few=100),
}
