"""Readers of data sets: records, tables, tars and the files beside them, meta-datasets, images."""

from __future__ import annotations

import io
import itertools
import json
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image, features

from megavlm.config.schema import DatasetConfig
from megavlm.data.decode import decode, size_of
from megavlm.data.records import open_records, open_stream, prepare_stream
from megavlm.data.records.parts import conversation_of_parts
from megavlm.data.records.writing import write_shards
from megavlm.errors import UserError
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


@cache
def tables() -> list[bytes]:
    """Return parquet files of several shapes, encodings and compressions."""
    plain = [[{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]] * 9
    shapes: list[dict[str, Any]] = [
        {"messages": plain},
        {"text": ["a", "b", None] * 5, "image": [b"\xff\xd8" * 20] * 15},
        {"conversations": [json.dumps(TURNS)] * 5, "images": [["a.jpg"]] * 5},
        {"text": ["x" * 50] * 500},
    ]
    found = []
    for shape, compression in itertools.product(shapes, ("none", "snappy", "zstd", "gzip")):
        buffer = io.BytesIO()
        pq.write_table(pa.table(shape), buffer, compression=compression)
        found.append(buffer.getvalue())
    for encoding in ("DELTA_BYTE_ARRAY", "DELTA_LENGTH_BYTE_ARRAY"):
        buffer = io.BytesIO()
        pq.write_table(pa.table(shapes[3]), buffer, use_dictionary=False, column_encoding=encoding)
        found.append(buffer.getvalue())
    return found


@cache
def tar() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        return write_tar(Path(folder) / "0.tar", [sample(str(number)) for number in range(3)]).read_bytes()


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


def table(folder: Path, data: bytes) -> None:
    records("a.parquet")(folder, data)


@cache
def arrows() -> list[bytes]:
    """Return Arrow files of both formats, with images in the table and beside it."""
    kind = pa.struct({"bytes": pa.binary(), "path": pa.string()})
    images = [{"bytes": b"\xff\xd8" * 9, "path": None}, {"bytes": None, "path": "a.jpg"}] * 2
    table = pa.table({"conversations": [TURNS] * 4, "image": pa.array(images, kind)})
    found = []
    for new, each in itertools.product((pa.ipc.new_stream, pa.ipc.new_file), (table, pa.table({"text": ["a", "b"]}))):
        buffer = io.BytesIO()
        with new(buffer, each.schema) as file:
            file.write_table(each, max_chunksize=2)
        found.append(buffer.getvalue())
    return found


def saved(folder: Path, data: bytes) -> None:
    """Open a folder of `save_to_disk` whose state.json is `data`."""
    (folder / "saved").mkdir()
    (folder / "saved" / "data-00000-of-00001.arrow").write_bytes(arrows()[0])
    (folder / "saved" / "dataset_info.json").write_bytes(b"{}")
    (folder / "saved" / "state.json").write_bytes(data)
    open_records(DatasetConfig(str(folder / "saved"))).read(0)


def shards(folder: Path, data: bytes, name: str = "0.tar") -> None:
    source = DatasetConfig(str(folder / "data"), kind="webdataset")
    (folder / "data").mkdir()
    (folder / "data" / "0.tar").write_bytes(tar())
    if name != "0.tar":
        prepare_stream(source, run_dir=folder)
    (folder / "data" / name).write_bytes(data)
    prepare_stream(source, run_dir=folder)
    stream = open_stream(source, run_dir=folder, rank=0, world=1, seed=0)
    for _ in itertools.islice(stream, 5):
        pass


def meta_dataset(folder: Path, data: bytes) -> None:
    (folder / "data").mkdir()
    (folder / "data" / "0.tar").write_bytes(tar())
    prepare_stream(DatasetConfig(str(folder / "data"), kind="webdataset"), run_dir=folder)
    (folder / "meta.yaml").write_bytes(data)
    stream = open_stream(DatasetConfig(str(folder / "meta.yaml")), run_dir=folder, rank=0, world=1, seed=0)
    for _ in itertools.islice(stream, 3):
        pass


def position(folder: Path, data: bytes) -> None:
    """Go on from a position that a checkpoint has for a stream."""
    source = DatasetConfig(str(folder / "data"), kind="webdataset")
    (folder / "data").mkdir()
    (folder / "data" / "0.tar").write_bytes(tar())
    prepare_stream(source, run_dir=folder)
    stream = open_stream(source, run_dir=folder, rank=0, world=1, seed=0)
    with suppress(ValueError, RecursionError):
        state = json.loads(data)
        stream.load_state_dict(state if isinstance(state, dict) else {})
    for _ in itertools.islice(stream, 2):
        pass


@cache
def positions() -> list[bytes]:
    with tempfile.TemporaryDirectory() as name:
        source = DatasetConfig(f"{name}/data", kind="webdataset")
        (Path(name) / "data").mkdir()
        (Path(name) / "data" / "0.tar").write_bytes(tar())
        prepare_stream(source, run_dir=Path(name))
        stream = open_stream(source, run_dir=Path(name), rank=0, world=1, seed=0)
        next(iter(stream))
        return [json.dumps(stream.state_dict()).encode()]


def parts(folder: Path, data: bytes) -> None:
    """Read a sample of a tar whose json file is `data`, with other files whose names it chooses."""
    conversation_of_parts({"json": data, "jpg": b"", "1.jpg": b"", f"{'9' * 5000}.png": b"", "x.PNG": b""})


def notes(folder: Path, data: bytes) -> None:
    """Go on with an interrupted `tools/prepare_data.py`."""
    (folder / "a.json").write_text(json.dumps([{"text": "A text."}]))
    (folder / "out").mkdir()
    (folder / "out" / "prepare_data.json").write_bytes(data)
    import numpy as np

    found = open_records(DatasetConfig(str(folder / "a.json")))
    with suppress(UserError):
        write_shards(found, folder / "out", recipe={"a": 1}, order=np.arange(1), shard_bytes=2**20)


def image(folder: Path, data: bytes) -> None:
    """Read the size and the pixels of an image, in memory and from a file."""
    (folder / "a.jpg").write_bytes(data)
    with suppress(BadSample):
        size_of(folder / "a.jpg")
    found = decode(data)
    assert found.pixels.ndim == 3


LINES = [json.dumps(record).encode() for record in RECORDS]
PREPARED = json.dumps({"shard_counts": {"0.tar": 3}}).encode()
SPLIT = json.dumps({"split_parts": {"train": ["0.tar"]}, "exclude": []}).encode()
BLEND = {
    "__module__": "megatron.energon",
    "__class__": "MetadatasetV2",
    "splits": {"train": {"blend": [{"weight": 1, "path": "data"}]}},
}
CRUDE = b'{"__module__": "megatron.energon", "__class__": "CrudeWebdataset"}'
STATE = json.dumps({"_data_files": [{"filename": "data-00000-of-00001.arrow"}], "_split": "train"}).encode()
NOTES = (
    b'{"recipe": {"a": 1}, "records": 0, "samples": 0, "shards": 0, "skipped": {}, "skipped_bytes": 0, "done": false}'
)


def of_folder(name: str, content: bytes) -> Reader:
    return Reader(partial(shards, name=name), lambda: [content], few=4)


READERS = {
    "json": Reader(records("a.json"), lambda: [json.dumps([record] * 3).encode() for record in RECORDS], few=40),
    "jsonl": Reader(records("a.jsonl"), lambda: [b"\n".join(LINES[:1] * 3), *LINES], few=40),
    "csv": Reader(records("a.csv"), lambda: [b'question,answer,image\n"a ""b""\n",c,a.jpg\nd,e,\n'], few=40),
    "text": Reader(records("a.txt"), lambda: [b"one\ntwo\r\nthree\n"]),
    "parquet": Reader(table, tables),
    "arrow": Reader(records("a.arrow"), arrows, few=40),
    "saved data set": Reader(saved, lambda: [STATE]),
    "tar": Reader(shards, lambda: [tar()], few=5),
    "tar index": of_folder("0.tar.idx", bytes(8) + (2048).to_bytes(8, "little") * 3),
    "prepared folder": of_folder(".nv-meta/.info.json", PREPARED),
    "split": of_folder(".nv-meta/split.yaml", SPLIT),
    "dataset.yaml": of_folder(".nv-meta/dataset.yaml", CRUDE),
    "meta-dataset": Reader(meta_dataset, lambda: [json.dumps(BLEND).encode()], few=5),
    "stream position": Reader(position, positions, few=5),
    "tar sample": Reader(parts, lambda: LINES),
    "prepare_data.json": Reader(notes, lambda: [NOTES]),
    "image": Reader(image, pictures, memory=2**31, few=100),
}
